"""The engine: requests in, tokens out, one `step` at a time, over any `Executor`. Pure host code.

    add, fork -> waiting -> [schedule -> submit -> result -> update -> watch -> release] * -> ended

Called by `LLM` and by anyone who embeds it. The engine speaks token ids; a `TokenWatcher` per output is the
only way text reaches into the loop, so ids, text, logprobs and counts are always cut in the same place. The
steps themselves stand in `step_loop`, what a request makes of its tokens in `jaxserve.groups`.
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several

from jaxserve.executor import Executor, StepHandle
from jaxserve.groups.branch import branch_off
from jaxserve.groups.make import Grammars, Watchers
from jaxserve.groups.outbox import count_tokens
from jaxserve.groups.requests import Requests
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.schedule.observer import StepObserver
from jaxserve.schedule.scheduler import Scheduler
from jaxserve.schedule.sequence import Sequence
from jaxserve.schedule.starting_over import restart
from jaxserve.schedule.stats import scheduler_stats
from jaxserve.schedule.work_meter import WorkMeter
from jaxserve.sleep import Sleep
from jaxserve.stats import EngineStats, executor_stats
from jaxserve.step_loop import StepLoop
from jaxserve.turns import Turns
from jaxserve.weights_switch import WeightsSwitch, check_update_mode


class Engine:
    """Runs requests through a scheduler and an executor.

    Args:
        executor: runs the batches.
        scheduler: decides what each step computes.
        vocab_size: ids in [0, vocab_size) are accepted.
        max_model_len: most tokens of a sequence, prompt and output together.
        eos_token_ids: the model's end set.
        seed: where the draws of requests without a seed of their own come from.
        clock: seconds; tells the scheduler how long steps take.
        async_scheduling: plan and send each step while the one before is computed; outputs are the same.
        meter: adds up the work of steps; None = `stats` tell of no roofline.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        scheduler: Scheduler,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        async_scheduling: bool = False,
        meter: WorkMeter | None = None,
    ):
        self.executor = executor
        self.scheduler = scheduler
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.observers: list[StepObserver] = []  # look on at every step
        self.requests = Requests(
            scheduler,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=self.eos_token_ids,
            seed=seed,
        )
        self._loop = StepLoop(
            executor=executor,
            scheduler=scheduler,
            take_in=self.requests.take_in,
            observers=self.observers,
            clock=clock,
            async_scheduling=async_scheduling,
            vocab_size=vocab_size,
            meter=meter,
        )
        self.clock, self.meter = clock, meter
        self._switch = WeightsSwitch(executor, scheduler)
        self._sleep = Sleep(executor, scheduler)
        self._turns = Turns()
        self._in_change = False  # still set when the next call comes: the last one was cut short
        self._num_output_tokens = 0

    def add(self, request: Request, watcher: Watchers = None, grammar: Grammars = None) -> None:
        """Queues a request.

        Args:
            request: its prompt is checked here: at least one id, ids inside the vocabulary, room
                for the prompt in the context and in the page pool. A longer max_tokens is clamped
                to both.
            watcher: makes text of its ids, one per choice; without one its outputs carry ids only
                and stop strings are refused. A beam search takes none.
            grammar: what its structured_outputs demands, one per choice, each at its beginning.

        Raises:
            InvalidRequestError: the request is at fault; nothing was taken for it.
        """
        with self._turns.take("add"):
            self._recover()
            self._add(request, watcher, grammar)

    def fork(
        self,
        request_id: str,
        new_id: str,
        *,
        num_tokens: int | None = None,
        append_token_ids: Several[int] = (),
        sampling_params: SamplingParams | None = None,
        watcher: Watchers = None,
        grammar: Grammars = None,
        hold: bool = False,
        index: int = 0,
    ) -> None:
        """Queues a request that goes on from where another one is, or was: a branch of a tree search.

        Its prompt is the beginning of the other's tokens; whatever of that was computed, and still
        has its pages, is shared and not computed again. The other one is not changed: it runs on,
        or, if it was added with `hold`, stays to be forked again. To retreat, fork at an earlier
        position.

        Args:
            request_id: a request in flight, or one that has ended and is held.
            new_id: id of the new request.
            num_tokens: how many of its tokens, prompt included, the new prompt begins with; None =
                all so far (of one that has ended: all that were released).
            append_token_ids: what follows them in the new prompt.
            sampling_params: None = the other's, but for n (1), the seed (one of its own) and
                prompt_logprobs (none).
            watcher, grammar: as in `add`. With the other's sampling_params it goes on with the other's
                grammar, from where it branches off.
            hold: as in `Request`.
            index: which choice of the other request.

        Raises:
            InvalidRequestError: there is nothing to fork by that name, perhaps because the step under way,
                which this waits for, ended it; the new request is at fault.

        Source: tree of thoughts over shared KV pages, SGLang (Zheng et al., 2024), section 3.
        """
        with self._turns.take("fork"):
            self._recover()
            self._drain()
            branch = branch_off(
                self.requests.find(request_id) if isinstance(request_id, str) else None,
                request_id,
                new_id,
                index=index,
                num_tokens=num_tokens,
                append_token_ids=append_token_ids,
                sampling_params=sampling_params,
                hold=hold,
                grammar=grammar,
            )
            self._add(branch.request, watcher, branch.grammar, branch.parent, branch.num_shared)

    def _add(
        self,
        request: Request,
        watcher: Watchers,
        grammar: Grammars,
        parent: Sequence | None = None,
        num_tokens: int = 0,
    ) -> None:
        group = self.requests.make(request, watcher, grammar)
        group.arrival_s = self.clock()
        self._in_change = True
        group.start(parent, num_tokens)
        if group.has_ended:  # it asked for no tokens; its output lies in the outbox
            self._in_change = False
        else:
            self.requests.in_flight[request.id], self._in_change = group, False

    def abort(self, request_id: str, index: int | None = None) -> RequestOutput | None:
        """Ends a request between two steps and returns its pages; lets go of one that is held.

        Args:
            request_id: which request.
            index: end only this choice of it; None = all.

        Returns:
            What it still held back, with finish_reason "abort"; None when nothing of the request is
            in flight.
        """
        with self._turns.take("abort"):
            self._recover()
            requests, outbox = self.requests, self.requests.outbox
            group = requests.find(request_id) or outbox.owner(request_id)
            if group is None:
                return None
            if index is not None:
                group.check_index(index)
            self._in_change = True
            requests.abort(group, index)
            outputs = outbox.gather(group, index)
            num_output_tokens = self._num_output_tokens + count_tokens(outputs)
            outbox.remove(group, index)
            self._in_change, self._num_output_tokens = False, num_output_tokens
            self._let_weights_in()
            return outputs[0] if outputs else None

    @property
    def weights_version(self) -> int:
        """How often other weights took over; `CompletionOutput.weights_versions` is in these numbers."""
        return self.scheduler.weights_version

    def update_params(self, params: object, *, mode: str = "continue") -> int:
        """Goes on with other weights of the same model; nothing is compiled.

        Nothing that the old ones computed is used by the new ones: cached pages are given up. When
        that happens to requests in flight is the mode's to say:

            continue     now: they keep the tokens they have, and their KV is computed again
            finish_old   when those in flight have ended with the old weights, which stay in memory
                         until then; who is added meanwhile waits
            abort        now: they end with finish_reason "abort", handed out by the next `step`

        Args:
            params: as the executor's own: same tree, shapes and types.
            mode: one of these. Weights that are still waiting are replaced, whatever the mode.

        Returns:
            The version that tokens of the new weights will be tagged with.

        Raises:
            ConfigError: another tree, shape or type, or no such mode; nothing has changed.
        """
        check_update_mode(mode)
        with self._turns.take("update_params"):
            self._recover()
            prepared = self.executor.prepare_params(params)
            waits = mode == "finish_old" and bool(self.requests.in_flight)
            if waits:
                self._sleep.check_may_wait()
            else:
                self._drain()
            if mode == "abort":
                self._in_change = True
                self.requests.abort_all()
                self._in_change = False
            barrier = self.requests.arrivals.num_requests if waits else 0
            version = self._switch.give(prepared, barrier=barrier)
            self._let_weights_in()
            return version

    def _let_weights_in(self) -> None:
        """Those that wait, once the requests before them have ended."""
        if self._switch.may_take_over(self.requests.in_flight.values()):
            self._drain()
            self._in_change = True
            self._switch.take_over()
            self._sleep.take_params()
            self._in_change = False
            for observer in self.observers:
                observer.weights_changed()

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` was called, and not `wake`."""
        return self._sleep.level > 0

    def sleep(self, *, level: int = 1) -> None:
        """Gives the memory of the KV pages back, on the device and in host RAM.

        Requests in flight wait, keep their tokens, and go on after `wake` as if nothing had been; new
        ones are queued. Meanwhile `step` hands out what is left, while `has_work` says so, and then raises.

        Args:
            level: 1 = the pages; 2 = the weights too, as far as nobody else has them: `update_params`
                has to come before `wake`.

        Raises:
            ConfigError: no such level; 2 while requests are to end with the old weights.
        """
        with self._turns.take("sleep"):
            self._recover()
            self.check_sleep(level)
            self._drain()
            self._in_change = True
            self._sleep.begin(level)
            self._in_change = False

    def check_sleep(self, level: int) -> None:
        """Raises what `sleep` would; changes nothing."""
        self._sleep.check_level(level, self._switch.following is not None)

    def wake(self) -> None:
        """Makes the pages anew, after `sleep`; nothing is compiled.

        Raises:
            RuntimeError: the weights were given up, and no others were given. It still sleeps then, as
                when there is no memory for the pages.
        """
        with self._turns.take("wake"):
            self._recover()
            self._in_change = True
            self._sleep.end()
            self._in_change = False

    def reset_prefix_cache(self) -> int:
        """Gives up every cached page that no sequence uses; returns how many."""
        with self._turns.take("reset_prefix_cache"):
            self._recover()
            self._in_change = True
            num_pages = self.scheduler.kv.evict_all()
            self._in_change = False
            return num_pages

    def has_request(self, request_id: str) -> bool:
        """Whether a request is in flight, or its output has not been handed out yet."""
        return self.requests.has(request_id)

    def has_work(self) -> bool:
        """Whether `step` has something to do or to hand out. Requests that are only held are none, nor
        are those that wait for `wake`.
        """
        requests = self.requests
        return bool(requests.outbox) or (bool(requests.in_flight) and not self._sleep.level)

    def begin_step(self) -> StepHandle | None:
        """Sends what `step` would, and returns what that will wait for: for who has several engines."""
        with self._turns.take("begin_step"):
            self._recover()
            self._let_weights_in()
            self._in_change = True
            handle = None if self._sleep.level else self._loop.begin()
            self._in_change = False
        return handle

    def step(self) -> list[RequestOutput]:
        """Runs one step, and with async_scheduling sends the next one too.

        Interrupted (Ctrl-C) or failing in the middle, it loses nothing: the next call computes the
        unfinished sequences again from the tokens they had.

        Returns:
            What each request released in it: new ids, text and logprobs only, of the choices that
            have any. A choice that ends appears with its finish_reason, even when it released
            nothing.
        """
        with self._turns.take("step"):
            self._recover()
            requests = self.requests
            self._let_weights_in()
            if self._sleep.level and not requests.outbox:
                raise RuntimeError("Engine.step: the engine sleeps; wake() has to come first")
            if not self._sleep.level:
                self._in_change = True
                self._loop.step()
                self._let_weights_in()
            self._in_change = True
            outputs = requests.outbox.gather()
            num_output_tokens = self._num_output_tokens + count_tokens(outputs)
            requests.outbox.remove()
            self._in_change, self._num_output_tokens = False, num_output_tokens
        return outputs

    def _drain(self) -> None:
        """Finishes the step under way; what it releases is handed out by the next `step`."""
        self._in_change = True
        self._loop.drain()
        self.requests.outbox.keep()
        self._in_change = False

    def _recover(self) -> None:
        """After a call that was cut short: pages and queues go; each unfinished sequence waits again."""
        if not self._in_change:
            return
        self._loop.forget()
        seqs = self.requests.rewind()
        self._sleep.recover()
        self._switch.recover()
        restart(self.scheduler, seqs)
        self._in_change = False

    def stats(self) -> EngineStats:
        """Counters and gauges as they stand between two steps."""
        return EngineStats(
            **scheduler_stats(self.scheduler),
            **executor_stats(self.executor.description),
            max_model_len=self.max_model_len,
            num_prompt_tokens=self.requests.num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            weights_version=self.weights_version,
            is_asleep=self.is_asleep,
            roofline=self._loop.roofline_stats(),
        )

    def check_invariants(self) -> None:
        """Raises AssertionError when the queues, the pages and the requests in flight disagree."""
        self.requests.check_invariants()
