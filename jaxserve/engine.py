"""The engine: requests in, tokens out, one `step` at a time, over any `Executor`. Pure host code.

    add -> waiting -> [schedule -> submit -> result -> update -> watch -> release] * -> finished

Called by `LLM` and by anyone who embeds it. The engine speaks token ids; a `TokenWatcher` per
request is the only way text reaches into the loop, so ids, text, logprobs and counts are always cut
in the same place.
"""

import hashlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.errors import InvalidRequestError, shown
from jaxserve.executor import Executor
from jaxserve.request import (
    CompletionOutput,
    Request,
    RequestOutput,
    as_token_ids,
    merge_outputs,
)
from jaxserve.schedule.batch import build_batch
from jaxserve.schedule.scheduler import Scheduler
from jaxserve.schedule.sequence import Sequence
from jaxserve.stats import EngineStats
from jaxserve.text.watcher import Observation, TokenWatcher


class Progress(NamedTuple):
    """Output tokens that the watcher has seen, and how many of them were made ready for the caller."""

    num_observed: int
    num_released: int


@dataclass(kw_only=True)
class SequenceGroup:
    """A request in flight: its sequence and how much of it has been released.

    Args:
        seq: the sequence (one per request today).
        watcher: turns its ids into text and may end it; None = ids only.
        progress: how far the watcher and the caller are.
        num_shown: output tokens given to the watcher. More than progress.num_observed once an
            observation was cut short: that watcher cannot be trusted any more.
    """

    seq: Sequence
    watcher: TokenWatcher | None
    progress: Progress = field(default=Progress(0, 0))
    num_shown: int = 0


class Engine:
    """Runs requests through a scheduler and an executor.

    Args:
        executor: runs the batches.
        scheduler: decides what each step computes.
        vocab_size: ids in [0, vocab_size) are accepted.
        max_model_len: most tokens of a sequence, prompt and output together.
        eos_token_ids: the model's end set.
        seed: where the draws of requests without a seed of their own come from.
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
    ):
        self.executor = executor
        self.scheduler = scheduler
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self._seed = seed
        self._groups: dict[str, SequenceGroup] = {}
        self._ready: dict[str, RequestOutput] = {}  # made by this step, not handed out yet
        self._held: list[RequestOutput] = []  # the same, of a step that was cut short
        self._one_at_a_time = threading.Lock()
        self._in_change = False  # still set when the next call comes: the last one was cut short
        self._num_added = 0
        self._num_steps = 0
        self._num_scheduled_tokens = 0
        self._num_padding_tokens = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def add(self, request: Request, watcher: TokenWatcher | None = None) -> None:
        """Queues a request.

        Args:
            request: its prompt is checked here: at least one id, ids inside the vocabulary, room
                for the prompt in the context and in the page pool. A longer max_tokens is clamped
                to both.
            watcher: makes text of its ids; without one its outputs carry ids only and stop strings
                are refused.

        Raises:
            InvalidRequestError: the request is at fault; nothing was taken for it.
        """
        prompt = as_token_ids(request.prompt_token_ids)
        params = request.sampling_params
        with self._exclusive("add"):
            max_tokens = self._check(request, prompt, watcher)
            arrival = self._num_added
            own_stops = frozenset(params.stop_token_ids)
            seq = Sequence(
                request=request,
                prompt_token_ids=prompt,
                order=(arrival, 0),
                seed=self._seed_of(request, arrival),
                max_tokens=max_tokens,
                stop_ids=own_stops if params.ignore_eos else own_stops | self.eos_token_ids,
                page_table=self.scheduler.kv.new_table(),
            )
            self._num_added += 1
            self._num_prompt_tokens += len(prompt)
            group = SequenceGroup(seq=seq, watcher=watcher)
            if max_tokens == 0:
                self._ready[request.id] = self._output(group, [], "length", None)
            else:
                self._in_change = True
                self.scheduler.add(seq)
                self._groups[request.id], self._in_change = group, False

    def _check(
        self, request: Request, prompt: tuple[int, ...], watcher: TokenWatcher | None
    ) -> int:
        """Raises if the request cannot be served; returns its output budget."""
        if self.has_request(request.id):
            raise InvalidRequestError(f"id {request.id!r} is already in flight", param="id")
        if request.sampling_params.stop and watcher is None:
            raise InvalidRequestError(
                "stop strings need a tokenizer; without one use stop_token_ids", param="stop"
            )
        for i in prompt:
            if not 0 <= i < self.vocab_size:
                raise InvalidRequestError(
                    f"prompt token ids must be in [0, {self.vocab_size}), got {shown(i)}",
                    param="prompt",
                )
        asked = request.sampling_params.max_tokens
        least = 0 if asked == 0 else 1
        room = self.max_model_len - len(prompt)
        if room < least:
            raise InvalidRequestError(
                f"prompt has {len(prompt)} tokens and needs room for {least} more, but the context "
                f"holds {self.max_model_len} (max_model_len)",
                param="prompt",
                code="context_length_exceeded",
            )
        if asked == 0:
            return 0
        # The last token sampled is never computed, so it needs no slot.
        pool_room = self.scheduler.kv.num_slots - len(prompt) + 1
        if pool_room < 1:
            raise InvalidRequestError(
                f"prompt has {len(prompt)} tokens, but the whole KV page pool holds "
                f"{self.scheduler.kv.num_slots}: it could never run (raise num_pages or "
                "kv_cache_gib)",
                param="prompt",
                code="kv_cache_exceeded",
            )
        room = min(room, pool_room)
        return room if asked is None else min(asked, room)

    def _seed_of(self, request: Request, arrival: int) -> int:
        own = request.sampling_params.seed
        return own % 2**64 if own is not None else derive_seed(self._seed, arrival)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request between two steps and returns its pages.

        Returns:
            What it still held back, with finish_reason "abort"; None when no such request is in
            flight.
        """
        with self._exclusive("abort"):
            group = self._groups.get(request_id)
            parts = [o for o in (*self._held, *self._ready.values()) if o.request_id == request_id]
            if group is not None:
                parts.append(self._last(group, "abort", None, [], flush=True))
                self._in_change = True
                self._forget(group)
                self._in_change = False
            self._held = [o for o in self._held if o.request_id != request_id]
            self._ready.pop(request_id, None)
            return merge_outputs(parts) if parts else None

    def has_request(self, request_id: str) -> bool:
        """Whether a request is in flight, or its output has not been handed out yet."""
        held = any(output.request_id == request_id for output in self._held)
        return held or request_id in self._groups or request_id in self._ready

    def has_work(self) -> bool:
        """Whether `step` has something to do or to hand out."""
        return bool(self._held or self._ready or self._groups)

    def step(self) -> list[RequestOutput]:
        """Schedules and runs one step.

        Interrupted (Ctrl-C) or failing in the middle, it loses nothing: the next call computes the
        unfinished sequences again from the tokens they had.

        Returns:
            What each request released in it: new ids, text and logprobs only. A request that ends
            appears with its finish_reason, even when it released nothing.
        """
        with self._exclusive("step"):
            self._in_change = True
            self._step()
            made = [*self._held, *self._ready.values()]
            worth = [o for o in made if o.finished or o.outputs[0].token_ids or o.outputs[0].text]
            self._held, self._ready, self._in_change = [], {}, False
        return worth

    def _step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is None:
            return
        handle = self.executor.submit(
            build_batch(plan, self.scheduler.buckets, self.scheduler.kv.max_pages_per_seq)
        )
        sampled = handle.result()
        self._num_steps += 1
        self._num_scheduled_tokens += plan.num_tokens
        self._num_padding_tokens += plan.num_padding_tokens
        for seq in self.scheduler.update(plan, sampled).advanced:
            self._release(self._groups[seq.request.id])

    @contextmanager
    def _exclusive(self, method: str) -> Iterator[None]:
        """One call at a time, and none on what a cut-short step has left behind."""
        if not self._one_at_a_time.acquire(blocking=False):
            raise RuntimeError(
                f"Engine.{method} was called while another thread is inside the engine: "
                "drive an engine from one thread, or put a lock around it"
            )
        try:
            if self._in_change:
                self._recover()
            yield
        finally:
            self._one_at_a_time.release()

    def _recover(self) -> None:
        """Throws away pages and queues; each unfinished sequence waits again with what was seen of it."""
        self._held, self._ready = [*self._held, *self._ready.values()], {}
        for group in self._groups.values():
            if group.num_shown > group.progress.num_observed:
                self._held.append(self._output(group, [], "abort", None))
            group.seq.rewind(group.progress.num_observed)
        ended = {output.request_id for output in self._held if output.finished}
        self._groups = {name: g for name, g in self._groups.items() if name not in ended}
        self.executor.reset()
        self.scheduler.restart(group.seq for group in self._groups.values())
        self._in_change = False

    def _release(self, group: SequenceGroup) -> None:
        """Looks at the token a sequence just got: ends it, makes ready what may be handed out."""
        seq = group.seq
        ending = seq.ending()
        if group.watcher is None:
            seen = Observation(text="", num_tokens=1, stop_reason=None, stopped=False)
        else:
            group.num_shown += 1
            seen = group.watcher.observe([seq.token_ids[-1]])
        if seen.stopped:
            output = self._output(group, [seen], "stop", seen.stop_reason)
        elif ending is not None:
            output = self._last(group, *ending, [seen], flush=True)
        else:
            output = self._output(group, [seen], None, None)
        num_released = group.progress.num_released + len(output.outputs[0].token_ids)
        progress = Progress(group.progress.num_observed + 1, num_released)
        # Two stores and no call in one statement: no interrupt can come between them.
        self._ready[seq.request.id], group.progress = output, progress
        self._num_output_tokens += 1
        if output.finished:
            self._forget(group)

    def _last(
        self,
        group: SequenceGroup,
        reason: str,
        stop_reason: str | int | None,
        seen: list[Observation],
        flush: bool,
    ) -> RequestOutput:
        """The output that ends a request; `flush` adds what its watcher still holds."""
        if flush and group.watcher is not None:
            rest = group.watcher.flush()
            seen = [*seen, rest]
            if rest.stopped:  # the very last characters, held until now, complete a stop string
                reason, stop_reason = "stop", rest.stop_reason
        return self._output(group, seen, reason, stop_reason)

    def _forget(self, group: SequenceGroup) -> None:
        self.scheduler.finish(group.seq)
        del self._groups[group.seq.request.id]

    def _output(
        self,
        group: SequenceGroup,
        seen: list[Observation],
        reason: str | None,
        stop_reason: str | int | None,
    ) -> RequestOutput:
        seq = group.seq
        begin = group.progress.num_released
        end = begin + sum(one.num_tokens for one in seen)
        first = seq.num_prompt_tokens
        wants_logprobs = seq.request.sampling_params.wants_logprobs
        completion = CompletionOutput(
            index=0,
            text="".join(one.text for one in seen),
            token_ids=seq.token_ids[first + begin : first + end].tolist(),
            logprobs=seq.logprobs[begin:end] if wants_logprobs else None,
            finish_reason=reason,
            stop_reason=stop_reason,
        )
        return RequestOutput(
            request_id=seq.request.id,
            outputs=[completion],
            num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=seq.num_cached_tokens,
        )

    def stats(self) -> EngineStats:
        """Counters and gauges as they stand between two steps."""
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        chosen = self.executor.description
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_pages=pool.num_pages,
            num_free_pages=pool.num_free,
            page_size=scheduler.kv.page_size,
            max_num_seqs=scheduler.buckets.max_num_seqs,
            max_num_batched_tokens=scheduler.buckets.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_steps=self._num_steps,
            num_preemptions=scheduler.counters.num_preemptions,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_padding_tokens=self._num_padding_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            attention_backend=str(chosen["attention_backend"]),
            attention_interpret=bool(chosen["attention_interpret"]),
            dtype=str(chosen["dtype"]),
            kv_cache_dtype=str(chosen["kv_cache_dtype"]),
        )

    def check_invariants(self) -> None:
        """Raises AssertionError when the queues, the pages and the requests in flight disagree."""
        self.scheduler.check_invariants()
        queued = {s.request.id for s in (*self.scheduler.running, *self.scheduler.waiting)}
        assert queued == self._groups.keys(), "a request is lost"
        if not queued:
            assert self.scheduler.kv.num_owned_pages == 0, "pages leaked"


def derive_seed(seed: int, index: int) -> int:
    """A 64-bit seed for request number `index` of an engine (or file) seeded with `seed`; the
    same everywhere.
    """
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
