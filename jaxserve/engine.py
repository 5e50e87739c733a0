"""The engine: requests in, tokens out, one `step` at a time, over any `Executor`. Pure host code.

    add, fork -> waiting -> [schedule -> submit -> result -> update -> watch -> release] * -> ended

Called by `LLM` and by anyone who embeds it. The engine speaks token ids; a `TokenWatcher` per
output is the only way text reaches into the loop, so ids, text, logprobs and counts are always cut
in the same place. The steps themselves stand in `step_loop`, what a request makes of its tokens in
`jaxserve.groups`.
"""

import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several

from jaxserve.errors import ConfigError, InvalidRequestError, shown
from jaxserve.executor import Executor, StepHandle
from jaxserve.groups.branch import branch_grammar, branch_request
from jaxserve.groups.group import Group
from jaxserve.groups.invariants import check_requests
from jaxserve.groups.limits import Limits
from jaxserve.groups.make import Arrivals, Grammars, Watchers, make_group
from jaxserve.groups.outbox import Outbox, count_tokens
from jaxserve.request import Request, RequestOutput, as_token_ids
from jaxserve.sampling_params import SamplingParams
from jaxserve.schedule.observer import StepObserver
from jaxserve.schedule.plan import StepResult
from jaxserve.schedule.scheduler import Scheduler
from jaxserve.schedule.sequence import Sequence
from jaxserve.schedule.stats import scheduler_stats
from jaxserve.stats import EngineStats
from jaxserve.step_loop import StepLoop


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
        async_scheduling: plan and send each step while the one before it is still computed. Outputs
            are the same.
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
    ):
        self.executor = executor
        self.scheduler = scheduler
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.observers: list[StepObserver] = []  # look on at every step
        self._loop = StepLoop(
            executor=executor,
            scheduler=scheduler,
            take_in=self._take_in,
            observers=self.observers,
            clock=clock,
            async_scheduling=async_scheduling,
            vocab_size=vocab_size,
        )
        self.clock = clock
        self._seed = seed
        self._groups: dict[str, Group] = {}
        self._held_groups: dict[str, Group] = {}  # ended, their pages kept for `fork`
        self._outbox = Outbox()
        self._one_at_a_time = threading.Lock()
        self._in_change = False  # still set when the next call comes: the last one was cut short
        self.arrivals = Arrivals()
        self._num_prompt_tokens = 0
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
        with self._alone("add"):
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
            InvalidRequestError: there is nothing to fork by that name; the new request is at fault.

        Source: tree of thoughts over shared KV pages, SGLang (Zheng et al., 2024), section 3.
        """
        with self._alone("fork"):
            self._recover()
            self._drain()
            group = self._group(request_id) if isinstance(request_id, str) else None
            if group is None:
                raise InvalidRequestError(
                    f"request {shown(request_id)} is neither in flight nor held", param="id"
                )
            parent, known = group.branch_point(index)
            request, num_shared = branch_request(
                group.request, new_id, known, num_tokens, append_token_ids, sampling_params, hold
            )
            if sampling_params is None and grammar is None:
                grammar = branch_grammar(parent, request, num_shared)
            self._add(request, watcher, grammar, parent, num_shared)

    def _add(
        self,
        request: Request,
        watcher: Watchers,
        grammar: Grammars,
        parent: Sequence | None = None,
        num_tokens: int = 0,
    ) -> None:
        prompt = as_token_ids(request.prompt_token_ids)
        if self.has_request(request.id) or request.id in self._held_groups:
            raise InvalidRequestError(f"id {request.id!r} is already in flight or held", param="id")
        limits = Limits(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            num_slots=self.scheduler.kv.num_slots,
        )
        max_tokens = limits.output_budget(request, prompt)
        group = make_group(
            request,
            prompt,
            max_tokens,
            watcher,
            grammar,
            arrival=self.arrivals.num_requests,
            engine_seed=self._seed,
            eos_token_ids=self.eos_token_ids,
            scheduler=self.scheduler,
            outbox=self._outbox,
        )
        self.arrivals.num_requests += 1
        self._num_prompt_tokens += len(prompt)
        group.arrival_s = self.clock()
        self._in_change = True
        group.start(parent, num_tokens)
        if group.has_ended:  # it asked for no tokens; its output lies in the outbox
            self._in_change = False
        else:
            self._groups[request.id], self._in_change = group, False

    def abort(self, request_id: str, index: int | None = None) -> RequestOutput | None:
        """Ends a request between two steps and returns its pages; lets go of one that is held.

        Args:
            request_id: which request.
            index: end only this choice of it; None = all.

        Returns:
            What it still held back, with finish_reason "abort"; None when nothing of the request is
            in flight.
        """
        with self._alone("abort"):
            self._recover()
            group = self._group(request_id) or self._outbox.owner(request_id)
            if group is None:
                return None
            if index is not None:
                group.check_index(index)
            self._in_change = True
            if not group.has_ended:
                group.abort(index)
                if group.has_ended:
                    self._settle(group)
            if index is None and request_id in self._held_groups:
                group.let_go()
                del self._held_groups[request_id]
            outputs = self._outbox.gather(group, index)
            num_output_tokens = self._num_output_tokens + count_tokens(outputs)
            self._outbox.remove(group, index)
            self._in_change, self._num_output_tokens = False, num_output_tokens
            return outputs[0] if outputs else None

    def _group(self, request_id: str) -> Group | None:
        """The request of this id that is in flight or held."""
        return self._groups.get(request_id) or self._held_groups.get(request_id)

    def update_params(self, params: object) -> None:
        """Goes on with other weights of the same model.

        Requests in flight keep the tokens they have and go on with the new weights; their KV is
        computed again, and nothing that the old ones computed is used any more.

        Args:
            params: as the executor's own: same tree, shapes and types.

        Raises:
            ConfigError: they are not; nothing has changed.
        """
        with self._alone("update_params"):
            self._recover()
            self._drain()
            self._in_change = True
            try:
                self.executor.update_params(params)
            except ConfigError:  # the old ones stay, and all that they computed
                self._in_change = False
                raise
            self.scheduler.change_weights()
            self._in_change = False
            for observer in self.observers:
                observer.weights_changed()

    def reset_prefix_cache(self) -> int:
        """Gives up every cached page that no sequence uses; returns how many."""
        with self._alone("reset_prefix_cache"):
            self._recover()
            self._in_change = True
            num_pages = self.scheduler.kv.evict_all()
            self._in_change = False
            return num_pages

    def has_request(self, request_id: str) -> bool:
        """Whether a request is in flight, or its output has not been handed out yet."""
        return request_id in self._groups or self._outbox.has(request_id)

    def has_work(self) -> bool:
        """Whether `step` has something to do or to hand out. Requests that are only held are none."""
        return bool(self._groups) or bool(self._outbox)

    def begin_step(self) -> StepHandle | None:
        """Sends what `step` would, so that whoever drives several engines can wait for all of them.

        Returns:
            What the next `step` will wait for; None when it waits for nothing.
        """
        with self._alone("begin_step"):
            self._recover()
            self._in_change = True
            handle = self._loop.begin()
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
        with self._alone("step"):
            self._recover()
            self._in_change = True
            self._loop.step()
            outputs = self._outbox.gather()
            num_output_tokens = self._num_output_tokens + count_tokens(outputs)
            self._outbox.remove()
            self._in_change, self._num_output_tokens = False, num_output_tokens
        return outputs

    def _drain(self) -> None:
        """Finishes the step under way; what it releases is handed out by the next `step`."""
        self._in_change = True
        self._loop.drain()
        self._outbox.keep()
        self._in_change = False

    def _take_in(self, result: StepResult, now_s: float) -> None:
        groups = self._groups
        advanced, failed = result
        ended: set[Group] = set()
        for seq in failed:
            group = groups[seq.request.id]
            group.fail(seq)
            if group.has_ended:
                ended.add(group)
        beams: dict[Group, list[Sequence]] = {}
        for seq in advanced:
            group = groups[seq.request.id]
            if group.last_token_s is None:
                group.first_token_s = now_s
            group.last_token_s = now_s
            if seq.wants_candidates:  # all of a group at once
                beams.setdefault(group, []).append(seq)
            elif not group.take_plain_token(seq):
                group.advance((seq,))
                if group.has_ended:
                    ended.add(group)
        for group, seqs in beams.items():
            group.advance(seqs)
            if group.has_ended:
                ended.add(group)
        for group in ended:
            self._settle(group)

    def _settle(self, group: Group) -> None:
        """Takes a request that has ended out of those in flight."""
        if group.held:
            self._held_groups[group.request.id] = group
        self._groups.pop(group.request.id, None)

    def _alone(self, method: str) -> threading.Lock:
        """The lock that a call holds, for its `with`; refuses a call while another one is inside.

        A plain lock in a `with` of its own: no interrupt comes between taking it and being sure to
        give it back. (Two that pass the check at the same time come one after the other.)
        """
        if self._one_at_a_time.locked():
            raise RuntimeError(
                f"Engine.{method} was called while another thread is inside the engine: "
                "drive an engine from one thread, or put a lock around it"
            )
        return self._one_at_a_time

    def _recover(self) -> None:
        """After a call that was cut short: throws away pages and queues; each unfinished sequence
        waits again with what was seen of it.
        """
        if not self._in_change:
            return
        self._loop.forget()
        self._outbox.keep()
        groups = self._groups | self._held_groups
        seqs = [seq for group in groups.values() for seq in group.rewind()]
        self._held_groups = {name: g for name, g in groups.items() if g.has_ended and g.held}
        self._groups = {name: g for name, g in groups.items() if not g.has_ended}
        self.executor.reset()
        self.scheduler.restart(seqs)
        self._in_change = False

    def stats(self) -> EngineStats:
        """Counters and gauges as they stand between two steps."""
        chosen = self.executor.description
        return EngineStats(
            **scheduler_stats(self.scheduler),
            max_model_len=self.max_model_len,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            attention_backend=str(chosen["attention_backend"]),
            attention_interpret=bool(chosen["attention_interpret"]),
            dtype=str(chosen["dtype"]),
            kv_cache_dtype=str(chosen["kv_cache_dtype"]),
        )

    def check_invariants(self) -> None:
        """Raises AssertionError when the queues, the pages and the requests in flight disagree."""
        check_requests(self._groups, self._held_groups, self._outbox, self.scheduler)
