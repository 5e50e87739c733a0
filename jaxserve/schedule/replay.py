"""Runs a schedule log again: the same batches on an executor of the same shapes, with no scheduler.

`ScheduleLog` reads the lines of `schedule_log.ScheduleLogWriter`; `replay` submits what they say and
compares the tokens. Called by `jaxserve replay` and by anyone who has an executor.

Invariant: the tokens of a replayed sequence are those of the log. So a replay that differs says so
where it happens, and what the batches hold never depends on what was replayed.
"""

import dataclasses
import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from jaxserve.executor import Executor
from jaxserve.pages.page_table import PageTable
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.schedule.batch_builder import build_batch
from jaxserve.schedule.buckets import Bucket
from jaxserve.schedule.plan import ScheduledSlice, StepPlan
from jaxserve.schedule.schedule_log import (
    FORMAT,
    SAMPLING_FIELDS,
    LogHeader,
    ScheduleLogError,
    outcomes,
    take_outcome,
)
from jaxserve.schedule.sequence import Sequence

_FAULTS = (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError)


class LoggedStep(NamedTuple):
    """A step of a log.

    Args:
        number: from 1.
        plan: its sequences have tokens and pages as they were.
        outcomes: what each slice sampled, as `schedule_log.outcomes` gives it.
    """

    number: int
    plan: StepPlan
    outcomes: list[list[int] | None]


class ScheduleLog:
    """The steps of a log, one at a time.

    Args:
        lines: of the file. A last one without its end is what a kill leaves, and is passed over.

    `has_end` tells, when all steps were read, whether the log was closed by who wrote it; if not, there
    may have been more steps.

    Raises:
        ScheduleLogError: this is no schedule log, or a line is at fault (also from `steps`).
    """

    def __init__(self, lines: Iterable[bytes]):
        self._records = _records(lines)
        number, first = next(self._records, (1, {}))
        with _faults_of(number):
            if first.pop("schedule_log", None) != FORMAT:
                raise ValueError("not the header of a schedule log of this version")
            self.header = LogHeader(**first)
            self._check_header()
        self._sequences: dict[int, Sequence] = {}
        self._last_step = 0
        self.has_end = False

    def _check_header(self) -> None:
        for field in dataclasses.fields(LogHeader):
            value = getattr(self.header, field.name)
            least = 0 if field.name == "num_host_pages" else 1
            if field.type is int and (type(value) is not int or value < least):
                raise ValueError(f"{field.name} is {value!r}")
        self.buckets, self.max_pages = self.header.buckets, self.header.max_pages
        self.header = dataclasses.replace(  # with tuples, where JSON has lists or nothing
            self.header, token_buckets=self.buckets.tokens, row_buckets=self.buckets.rows
        )

    def steps(self) -> Iterator[LoggedStep]:
        """Each step, with its sequences as they were; they change when the next one is asked for."""
        for number, record in self._records:
            with _faults_of(number):
                if self.has_end:
                    raise ValueError("a line behind the end of the log")
                if "end" in record:
                    self._end(record["end"]["num_steps"])
                    continue
                if "sequence" in record:
                    self._introduce(record)
                    continue
                if "weights_changed_after" in record:
                    raise ValueError(
                        f"the weights were changed after step {record['weights_changed_after']}: "
                        "only what ran before can be replayed"
                    )
                step = self._step(record)
            self._last_step = step.number
            yield step
            with _faults_of(number):
                for one, ids in zip(step.plan.slices, step.outcomes, strict=True):
                    take_outcome(one.seq.token_ids, one, ids)
                for sequence in record.get("ended", ()):
                    self._sequences.pop(sequence, None)

    def _end(self, num_steps: int) -> None:
        if num_steps != self._last_step:
            raise ValueError(f"the log ends after step {self._last_step}, and says {num_steps}")
        self.has_end = True

    def _introduce(self, record: Mapping[str, Any]) -> None:
        token_ids = _ints(record["token_ids"])
        prompt = tuple(token_ids[: record["num_prompt_tokens"]])
        arrival, branch = _ints(record["order"])
        params = SamplingParams(**{name: record[name] for name in SAMPLING_FIELDS})
        (seed,) = _ints([record["seed"]])
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed {seed} is not in [0, 2**64)")
        seq = Sequence(
            request=Request(
                id=record["request_id"], prompt_token_ids=prompt, sampling_params=params
            ),
            prompt_token_ids=prompt,
            order=(arrival, branch),
            seed=seed,
            max_tokens=self.header.max_model_len - len(prompt),
            stop_ids=frozenset(),
            page_table=PageTable(self.max_pages, self.header.page_size),
            wants_candidates=record["is_beam"],
        )
        seq.token_ids = array("i", token_ids)
        self._sequences[record["sequence"]] = seq

    def _step(self, record: Mapping[str, Any]) -> LoggedStep:
        for key, (start, *ids) in record.get("tokens", {}).items():
            token_ids = self._sequences[int(key)].token_ids
            token_ids[start : start + len(ids)] = array("i", ids)
        for key, (first, *page_ids) in record.get("pages", {}).items():
            table = self._sequences[int(key)].page_table
            kept = table.clear()[:first]
            table.append([*kept, *_within(page_ids, 1, self.header.num_pages)])
        bucket = Bucket(*_ints(record["bucket"]))
        slices = tuple(self._slice(_ints(one)) for one in record["slices"])
        plan = StepPlan(
            slices=slices,
            bucket=bucket,
            num_tokens=sum(one.num_tokens for one in slices),
            num_steps=record.get("num_steps", 1),
            moves_out=self._moves("moves_out", record),
            copies=self._moves("copies", record),
            moves_in=self._moves("moves_in", record),
        )
        num_rows = sum(one.num_samples for one in slices)
        self._check_steps(plan)
        in_ladders = (
            bucket.num_tokens in self.buckets.tokens and bucket.num_rows in self.buckets.rows
        )
        if not in_ladders or plan.num_padding_tokens < 0 or num_rows > bucket.num_rows:
            raise ValueError(f"a step of {plan.num_tokens} tokens and {num_rows} rows in {bucket}")
        if not 0 < len(slices) <= self.buckets.max_num_seqs:
            raise ValueError(f"{len(slices)} slices in a step")
        found = [None if ids is None else _ints(ids) for ids in record["outcomes"]]
        if len(found) != len(slices):
            raise ValueError(f"{len(found)} outcomes of {len(slices)} slices")
        return LoggedStep(record["step"], plan, found)

    def _slice(self, one: list[int]) -> ScheduledSlice:
        key, start, num_tokens, num_samples = one
        seq = self._sequences[key]
        stop = start + num_tokens
        if start < 0 or num_tokens < 1 or num_samples not in (0, 1):
            raise ValueError(f"slice {one}")
        if stop > len(seq.token_ids):
            raise ValueError(f"slice {one} of a sequence of {len(seq.token_ids)} tokens")
        if stop > seq.page_table.num_slots:
            raise ValueError(f"slice {one} passes its {len(seq.page_table)} pages")
        if num_samples and stop < len(seq.token_ids):
            raise ValueError(f"slice {one} samples before the end of {len(seq.token_ids)} tokens")
        seq.num_computed_tokens = start
        return ScheduledSlice(seq, start, num_tokens, num_samples)

    def _check_steps(self, plan: StepPlan) -> None:
        """Several tokens of each slice need rows of one token that samples, with pages for all."""
        num_steps = plan.num_steps
        if type(num_steps) is not int or num_steps < 1:
            raise ValueError(f"num_steps {num_steps!r}")
        if num_steps == 1:
            return
        for one in plan.slices:
            if one.num_tokens > 1 or not one.num_samples or one.seq.wants_candidates:
                raise ValueError(
                    f"{num_steps} steps of a slice that is no single token that samples"
                )
            if one.start + num_steps > one.seq.page_table.num_slots:
                raise ValueError(f"{num_steps} steps pass {len(one.seq.page_table)} pages")

    def _moves(self, name: str, record: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        device, host = (1, self.header.num_pages), (0, self.header.num_host_pages)
        sides = {
            "moves_out": (device, host),
            "copies": (device, device),
            "moves_in": (host, device),
        }
        source, target = sides[name]
        moves = []
        for begin, end in record.get(name, ()):
            _within([begin], *source)
            _within([end], *target)
            moves.append((begin, end))
        return tuple(moves)


def _records(lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbers and contents of the lines that are whole."""
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return
        with _faults_of(number):
            record = _json(line, "not valid JSON" if number > 1 else "not a schedule log")
            if not isinstance(record, dict):
                raise ValueError("not an object")
        yield number, record


def _json(line: bytes, fault: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:  # its own text counts lines within the line
        msg, position = error.msg.removesuffix(" at"), error.pos + 1
        raise ValueError(f"{fault}: {msg} at character {position}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{fault}: not UTF-8 at byte {error.start}") from None


@contextmanager
def _faults_of(number: int) -> Iterator[None]:
    """Whatever is wrong with a line, said with its number."""
    try:
        yield
    except RecursionError:
        raise ScheduleLogError(f"line {number}: nested too deeply") from None
    except _FAULTS as error:
        text = f"{type(error).__name__} {error}" if isinstance(error, KeyError) else str(error)
        raise ScheduleLogError(f"line {number}: {text}") from None


def _ints(values: Any) -> list[int]:
    found = list(values)
    if not all(type(value) is int for value in found):
        raise ValueError(f"expected integers, got {found[:8]}")
    return found


def _within(values: Any, least: int, end: int) -> list[int]:
    found = _ints(values)
    for value in found:
        if not least <= value < end:
            raise ValueError(f"page {value} is not in [{least}, {end})")
    return found


class Difference(NamedTuple):
    """Where a replay left the log.

    Args:
        step: number of the step.
        request_id: whose.
        branch: which of its sequences: a choice, a beam.
        position: of the output token; -1 and less: in the middle of the prompt.
        rank: which of the slice's tokens, or of a beam's candidates.
        logged, replayed: all that the slice sampled; None where it failed.
    """

    step: int
    request_id: str
    branch: int
    position: int
    rank: int
    logged: list[int] | None
    replayed: list[int] | None

    def __str__(self) -> str:
        rank = f", candidate {self.rank}" if self.rank else ""
        return (
            f"step {self.step}: request {self.request_id!r}, branch {self.branch}, output token "
            f"{self.position}{rank}: {self._shown(self.logged)} in the log, "
            f"{self._shown(self.replayed)} in the replay"
        )

    def _shown(self, outcome: list[int] | None) -> str:
        if outcome is None:
            return "NaN or infinity"
        return str(outcome[self.rank]) if self.rank < len(outcome) else "nothing"


class Replay(NamedTuple):
    """What came of a replay: all up to the first difference, or everything.

    Args:
        num_steps, num_tokens: that were the same.
        difference: the first one.
        is_whole: the log was replayed to the end that its writer gave it. False where something
            differs, and where the log was cut short or is still being written.
    """

    num_steps: int
    num_tokens: int
    difference: Difference | None
    is_whole: bool


def replay(executor: Executor, log: ScheduleLog) -> Replay:
    """Runs the steps of a log until its end, or until something differs.

    Args:
        executor: idle, warmed up, with the shapes of `log.header`.
        log: read from its beginning.

    Raises:
        ScheduleLogError: a line is at fault.
    """
    num_steps = num_tokens = 0
    for step in log.steps():
        batch = build_batch(step.plan, log.buckets, log.max_pages)
        found = outcomes(step.plan, executor.submit(batch).result())
        for one, logged, replayed in zip(step.plan.slices, step.outcomes, found, strict=True):
            if logged != replayed:
                difference = _difference(step, one, logged, replayed)
                return Replay(num_steps, num_tokens, difference, is_whole=False)
        num_steps += 1
        num_tokens += sum(one.num_samples for one in step.plan.slices) * step.plan.num_steps
    return Replay(num_steps, num_tokens, None, is_whole=log.has_end)


def _difference(
    step: LoggedStep, one: ScheduledSlice, logged: list[int] | None, replayed: list[int] | None
) -> Difference:
    pairs = itertools.zip_longest(logged or (), replayed or ())
    rank = next((i for i, (then, now) in enumerate(pairs) if then != now), 0)
    return Difference(
        step=step.number,
        request_id=one.seq.request.id,
        branch=one.seq.order[1],
        position=one.start + one.num_tokens - one.seq.num_prompt_tokens,
        rank=rank,
        logged=logged,
        replayed=replayed,
    )
