"""The schedule log: every step of an engine as one line of JSON, enough to run it again.

`ScheduleLogWriter` is an observer of the engine; `schedule.replay` reads what it wrote. Nothing here
opens a file.

A log tells what ran, not what was asked for. A line is one of these objects, told apart by the first
key:

    {"schedule_log": 1, ...}       the header, once: `LogHeader`
    {"sequence": 0, ...}           a sequence, before its first slice: its request and branch, its
                                   tokens so far, and how it samples
    {"step": 1, "bucket": [T, R],
     "slices": [[sequence, start, num_tokens, num_samples], ...],
     "pages": {sequence: [first, page_id, ...]},     its page table from entry `first` on
     "tokens": {sequence: [start, token_id, ...]},   its tokens from there on
     "moves_out", "copies", "moves_in": [[from, to], ...],
     "num_steps": n,                                 where it is more than 1: tokens of each slice
     "masks": [W, text],                             where rows may not sample every token: `write_masks`
     "outcomes": [[token_id, ...] or null, ...],     what each slice sampled; null where it failed
     "ended": [sequence, ...], "step_s": seconds}    those that are in no later step
    {"weights_changed_after": step}
    {"end": {"num_steps": n}}      the last line of a log that was closed; a log without it was cut
                                   short, or is still being written

What is empty is left out. `pages` and `tokens` are there for what a reader cannot know: pages that
are not as in the sequence's last slice, and tokens that are neither from its prompt nor sampled in
its slices before (the choice among beams). So beams, forks, aborts and steps that were cut short need no
lines of their own. A beam's outcome is its candidates, best first. A slice fails when hidden states or
logits are NaN or infinite.
"""

import dataclasses
import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from jaxserve.errors import JaxserveError
from jaxserve.sampling_params import SamplingParams
from jaxserve.schedule.batch import SampledTokens
from jaxserve.schedule.buckets import Buckets
from jaxserve.schedule.masks import write_masks
from jaxserve.schedule.observer import StepRecord
from jaxserve.schedule.plan import ScheduledSlice, StepPlan
from jaxserve.schedule.sequence import Sequence, Status
from jaxserve.stats import EngineStats

FORMAT = 1
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")  # what a draw depends on
# This too, but it is left out where it is off.
OPTIONAL_FIELDS = ("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias")
MOVES = ("moves_out", "copies", "moves_in")


class ScheduleLogError(JaxserveError):
    """A schedule log that cannot be read or replayed; says which line is at fault, or what."""


@dataclass(frozen=True, kw_only=True)
class LogHeader:
    """What an engine has to be made of to run a log again.

    Args:
        jaxserve_version: wrote the log.
        model: fingerprint of the checkpoint; None = not known.
        page_size, num_pages, num_host_pages: of the page pools.
        max_num_seqs, max_num_batched_tokens, max_model_len: the limits.
        dtype, kv_cache_dtype, attention_backend, attention_interpret: what served.
        host_kv_gib: what was asked for the host pool.
        token_buckets, row_buckets: the ladders; logs from before they could be chosen leave them out,
            and mean powers of two.
    """

    jaxserve_version: str
    model: str | None
    page_size: int
    num_pages: int
    num_host_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    dtype: str
    kv_cache_dtype: str
    attention_backend: str
    attention_interpret: bool
    host_kv_gib: float
    token_buckets: tuple[int, ...] | None = None
    row_buckets: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, stats: EngineStats, *, version: str, model: str | None = None, host_kv_gib: float = 0.0
    ) -> "LogHeader":
        """The header for a running engine."""
        own = {field.name for field in dataclasses.fields(cls)}
        same = {name: getattr(stats, name) for name in own if hasattr(stats, name)}
        return cls(jaxserve_version=version, model=model, host_kv_gib=host_kv_gib, **same)

    @property
    def buckets(self) -> Buckets:
        return Buckets.make(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            tokens=self.token_buckets,
            rows=self.row_buckets,
        )

    @property
    def max_pages(self) -> int:
        """Pages a sequence (P)."""
        return -(-self.max_model_len // self.page_size)

    def engine_options(self) -> dict[str, object]:
        """Options of `LLM` that make an engine of the same shapes."""
        other = ("jaxserve_version", "model", "num_host_pages")
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in other}


@dataclass(kw_only=True)
class _Told:
    """What the lines so far say of a sequence."""

    number: int
    token_ids: array  # i32[known]
    pages: np.ndarray  # i32[pages]


class ScheduleLogWriter:
    """Writes what an engine does; a `StepObserver`.

    Args:
        write: takes a line, with its end.
        header: of the engine that is observed.
    """

    def __init__(self, write: Callable[[str], None], header: LogHeader):
        self._write = write
        self._told: WeakKeyDictionary[Sequence, _Told] = WeakKeyDictionary()
        self._num_sequences = 0
        self._num_steps = 0
        self._in_step = False
        write(_line({"schedule_log": FORMAT, **dataclasses.asdict(header)}))

    def weights_changed(self) -> None:
        self._write(_line({"weights_changed_after": self._num_steps}))

    def close(self) -> None:
        """Writes the log's end; but not behind a step that could not be written."""
        if not self._in_step:
            self._write(_line({"end": {"num_steps": self._num_steps}}))

    def step_done(self, step: StepRecord) -> None:
        if self._in_step:  # the last call was cut short: what it has told is not known
            self._told.clear()
        self._in_step = True
        plan = step.plan
        pages, tokens = self._news(step)
        numbers = [self._told[one.seq].number for one in plan.slices]
        found = outcomes(plan, step.sampled)
        later = () if step.following is None else {one.seq for one in step.following.slices}
        self._num_steps += 1
        line: dict[str, Any] = {
            "step": self._num_steps,
            "bucket": [plan.bucket.num_tokens, plan.bucket.num_rows],
            "slices": [
                [number, one.start, one.num_tokens, one.num_samples]
                for number, one in zip(numbers, plan.slices, strict=True)
            ],
            "pages": pages,
            "tokens": tokens,
            **{name: getattr(plan, name) for name in MOVES},
            "num_steps": plan.num_steps if plan.num_steps > 1 else (),
            "masks": () if step.masks is None else write_masks(step.masks),
            "outcomes": found,
            "ended": [
                number
                for number, one in zip(numbers, plan.slices, strict=True)
                if one.seq.status is Status.FINISHED and one.seq not in later
            ],
            "step_s": round(step.seconds, 6),
        }
        self._write(_line({key: value for key, value in line.items() if value not in ([], {}, ())}))
        for one, ids in zip(plan.slices, found, strict=True):
            take_outcome(self._told[one.seq].token_ids, one, ids)
        self._in_step = False

    def _news(self, step: StepRecord) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """What a reader does not know yet of a step's page tables and tokens, by sequence."""
        table = step.batch.page_table.reshape(len(step.batch.kv_lens), -1)
        pages: dict[int, list[int]] = {}
        tokens: dict[int, list[int]] = {}
        for row, one in enumerate(step.plan.slices):
            told = self._told.get(one.seq) or self._introduce(one)
            new_pages = _tell_pages(told, table[row])
            if new_pages:
                pages[told.number] = new_pages
            new_tokens = _tell_tokens(told, one)
            if new_tokens:
                tokens[told.number] = new_tokens
        return pages, tokens

    def _introduce(self, one: ScheduledSlice) -> _Told:
        """Writes the line of a sequence that has its first slice."""
        seq = one.seq
        # In the step that is told of, it may have got tokens behind the slice already.
        known = max(seq.num_prompt_tokens, one.start + one.num_tokens)
        token_ids = seq.token_ids[:known]
        params = seq.request.sampling_params
        line = {
            "sequence": self._num_sequences,
            "request_id": seq.request.id,
            "order": list(seq.order),
            "num_prompt_tokens": seq.num_prompt_tokens,
            "token_ids": token_ids.tolist(),
            "seed": seq.seed,
            **{name: getattr(params, name) for name in SAMPLING_FIELDS},
            **{name: value for name in OPTIONAL_FIELDS if (value := _if_set(params, name))},
            "is_beam": seq.wants_candidates,
        }
        self._write(_line(line))
        told = _Told(number=self._num_sequences, token_ids=token_ids, pages=np.zeros(0, np.int32))
        self._told[seq] = told
        self._num_sequences += 1
        return told


def _if_set(params: SamplingParams, name: str) -> Any:
    """A field's value; None where it is the default."""
    value = getattr(params, name)
    return None if value == getattr(SamplingParams, name) else value


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"


def _tell_pages(told: _Told, row: np.ndarray) -> list[int]:
    """[first entry that changed, page ids from there on]; empty when none has."""
    row = row[: np.count_nonzero(row)]  # no sequence has the null page
    before = told.pages
    if len(row) >= len(before) and (row[: len(before)] == before).all():
        first = len(before)
        if first == len(row):
            return []
    else:
        shared = min(len(row), len(before))
        differ = np.flatnonzero(row[:shared] != before[:shared])
        first = int(differ[0]) if len(differ) else shared
    told.pages = row.copy()
    return [first, *row[first:].tolist()]


def _tell_tokens(told: _Told, one: ScheduledSlice) -> list[int]:
    """[start, token ids of a slice], if they are not those told before; else empty.

    They begin earlier where tokens before the slice were never told: a beam may find in the cache
    what another one computed.
    """
    first, stop = min(one.start, len(told.token_ids)), one.start + one.num_tokens
    ids = one.seq.token_ids[first:stop]
    if told.token_ids[first:stop] == ids:
        return []
    told.token_ids[first:stop] = ids
    return [first, *ids.tolist()]


def outcomes(plan: StepPlan, sampled: SampledTokens) -> list[list[int] | None]:
    """What each slice of a step sampled: nothing, tokens, or candidates for a beam; None where it
    failed.
    """
    found: list[list[int] | None] = []
    row = 0
    for index, one in enumerate(plan.slices):
        if not sampled.finite[index]:
            found.append(None)
        elif not one.num_samples:
            found.append([])
        elif one.seq.wants_candidates:
            assert sampled.candidate_ids is not None
            found.append(sampled.candidate_ids[row, 0].tolist())
        else:
            found.append(sampled.token_ids[row, : sampled.num_tokens[row]].tolist())
        row += one.num_samples
    return found


def take_outcome(token_ids: array, one: ScheduledSlice, ids: list[int] | None) -> None:
    """Puts what a slice sampled behind it; a beam's candidates are only candidates."""
    if ids and not one.seq.wants_candidates:
        token_ids[one.start + one.num_tokens :] = array("i", ids)
