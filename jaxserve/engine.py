"""The engine: requests in, tokens out, one `step` at a time, over any `Executor`. Pure host code.

    add -> waiting -> [schedule -> submit -> result -> update -> watch -> release] * -> finished

Called by `LLM` and by anyone who embeds it. The engine speaks token ids; a `TokenWatcher` per
request is the only way text reaches into the loop, so ids, text, logprobs and counts are always cut
in the same place.
"""

import hashlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral

from jaxserve.errors import InvalidRequestError, shown
from jaxserve.executor import Executor
from jaxserve.request import CompletionOutput, Request, RequestOutput
from jaxserve.schedule.batch import build_batch
from jaxserve.schedule.scheduler import Scheduler
from jaxserve.schedule.sequence import Sequence
from jaxserve.text.watcher import Observation, TokenWatcher


@dataclass(kw_only=True)
class SequenceGroup:
    """A request in flight: its sequence and how much of it has been released.

    Args:
        seq: the sequence (one per request today).
        watcher: turns its ids into text and may end it; None = ids only.
        num_released: output tokens already handed out.
    """

    seq: Sequence
    watcher: TokenWatcher | None
    num_released: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot; the `num_` totals count since the engine was made."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_steps: int
    num_preemptions: int
    num_scheduled_tokens: int
    num_padding_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    attention_backend: str
    dtype: str


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
        self._empty: deque[RequestOutput] = deque()  # requests that asked for no token at all
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
        max_tokens = self._check(request, watcher)
        params = request.sampling_params
        arrival = self._num_added
        self._num_added += 1
        self._num_prompt_tokens += len(request.prompt_token_ids)
        if max_tokens == 0:
            self._empty.append(_empty_output(request))
            return
        own_stops = frozenset(params.stop_token_ids)
        seq = Sequence(
            request=request,
            arrival=arrival,
            seed=self._seed_of(request, arrival),
            max_tokens=max_tokens,
            stop_ids=own_stops if params.ignore_eos else own_stops | self.eos_token_ids,
            page_table=self.scheduler.kv.new_table(),
        )
        self._groups[request.id] = SequenceGroup(seq=seq, watcher=watcher)
        self.scheduler.add(seq)

    def _check(self, request: Request, watcher: TokenWatcher | None) -> int:
        """Raises if the request cannot be served; returns its output budget."""
        if self.has_request(request.id):
            raise InvalidRequestError(f"id {request.id!r} is already in flight", param="id")
        if request.sampling_params.stop and watcher is None:
            raise InvalidRequestError(
                "stop strings need a tokenizer; without one use stop_token_ids", param="stop"
            )
        ids = request.prompt_token_ids
        if len(ids) == 0:
            raise InvalidRequestError(
                "prompt must hold at least one token, got an empty one", param="prompt"
            )
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, Integral) or not 0 <= i < self.vocab_size:
                raise InvalidRequestError(
                    f"prompt token ids must be integers in [0, {self.vocab_size}), got {shown(i)}",
                    param="prompt",
                )
        asked = request.sampling_params.max_tokens
        room = min(self.max_model_len - len(ids), self.scheduler.kv.num_slots - len(ids) + 1)
        least = 0 if asked == 0 else 1
        if self.max_model_len - len(ids) < least:
            raise InvalidRequestError(
                f"prompt has {len(ids)} tokens and needs room for {least} more, but the context holds "
                f"{self.max_model_len} (max_model_len)",
                param="prompt",
                code="context_length_exceeded",
            )
        if room < least:
            raise InvalidRequestError(
                f"prompt has {len(ids)} tokens, but the whole KV page pool holds "
                f"{self.scheduler.kv.num_slots}: it could never run (raise num_pages or kv_cache_gib)",
                param="prompt",
                code="kv_cache_exceeded",
            )
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
        group = self._groups.get(request_id)
        return None if group is None else self._finish(group, "abort", None, [], flush=True)

    def has_request(self, request_id: str) -> bool:
        """Whether a request is in flight, or its output has not been handed out yet."""
        return request_id in self._groups or any(o.request_id == request_id for o in self._empty)

    def has_work(self) -> bool:
        """Whether `step` has something to do or to hand out."""
        return bool(self._empty) or self.scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Schedules and runs one step.

        Returns:
            What each request released in it: new ids, text and logprobs only. A request that ends
            appears with its finish_reason, even when it released nothing.
        """
        outputs = list(self._empty)
        self._empty.clear()
        plan = self.scheduler.schedule()
        if plan is None:
            return outputs
        handle = self.executor.submit(build_batch(plan, self.scheduler.buckets))
        sampled = handle.result()
        self._num_steps += 1
        self._num_scheduled_tokens += plan.num_tokens
        self._num_padding_tokens += plan.num_padding_tokens
        for seq in self.scheduler.update(plan, sampled):
            output = self._release(self._groups[seq.request.id])
            if output is not None:
                outputs.append(output)
        return outputs

    def _release(self, group: SequenceGroup) -> RequestOutput | None:
        """Looks at the token that a sequence just got: ends it, hands out what may be handed
        out.
        """
        seq = group.seq
        self._num_output_tokens += 1
        ending = seq.ending()
        if group.watcher is None:
            seen = Observation(text="", num_tokens=1, stop_reason=None, stopped=False)
        else:
            seen = group.watcher.observe([seq.token_ids[-1]])
        if seen.stopped:
            return self._finish(group, "stop", seen.stop_reason, [seen], flush=False)
        if ending is not None:
            reason, stop_token = ending
            return self._finish(group, reason, stop_token, [seen], flush=True)
        if seen.num_tokens == 0 and not seen.text:
            return None
        return self._output(group, [seen], None, None)

    def _finish(
        self,
        group: SequenceGroup,
        reason: str,
        stop_reason: str | int | None,
        seen: list[Observation],
        flush: bool,
    ) -> RequestOutput:
        self.scheduler.finish(group.seq)
        del self._groups[group.seq.request.id]
        if flush and group.watcher is not None:
            rest = group.watcher.flush()
            seen = [*seen, rest]
            if rest.stopped:  # the very last characters, held until now, complete a stop string
                reason, stop_reason = "stop", rest.stop_reason
        return self._output(group, seen, reason, stop_reason)

    def _output(
        self,
        group: SequenceGroup,
        seen: list[Observation],
        reason: str | None,
        stop_reason: str | int | None,
    ) -> RequestOutput:
        seq = group.seq
        begin = group.num_released
        group.num_released += sum(one.num_tokens for one in seen)
        first = seq.num_prompt_tokens
        wants_logprobs = seq.request.sampling_params.wants_logprobs
        completion = CompletionOutput(
            index=0,
            text="".join(one.text for one in seen),
            token_ids=seq.token_ids[first + begin : first + group.num_released],
            logprobs=seq.logprobs[begin : group.num_released] if wants_logprobs else None,
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
            num_preemptions=scheduler.num_preemptions,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_padding_tokens=self._num_padding_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            attention_backend=str(chosen["attention_backend"]),
            dtype=str(chosen["dtype"]),
        )

    def check_invariants(self) -> None:
        """Raises AssertionError when the queues, the pages and the requests in flight disagree."""
        self.scheduler.check_invariants()
        queued = {s.request.id for s in (*self.scheduler.running, *self.scheduler.waiting)}
        assert queued == self._groups.keys(), "a request is lost"
        if not queued:
            pool = self.scheduler.kv.pool
            assert pool.num_free == pool.num_usable, "pages leaked"


def derive_seed(seed: int, index: int) -> int:
    """A 64-bit seed for request number `index` of an engine (or file) seeded with `seed`; the
    same everywhere.
    """
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _empty_output(request: Request) -> RequestOutput:
    wants = request.sampling_params.wants_logprobs
    completion = CompletionOutput(
        index=0, text="", token_ids=[], logprobs=[] if wants else None, finish_reason="length"
    )
    return RequestOutput(
        request_id=request.id,
        outputs=[completion],
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
    )
