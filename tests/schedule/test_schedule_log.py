"""A schedule log holds all that the device was given, and a replay of it finds every change."""

import dataclasses
import json
import random
from collections.abc import Callable

import numpy as np
import pytest

from jaxserve.engine import Engine
from jaxserve.request import Request
from jaxserve.sampling_params import BeamParams, SamplingParams
from jaxserve.schedule.batch import DeviceBatch, SampledTokens
from jaxserve.schedule.batch_builder import build_batch
from jaxserve.schedule.buckets import Bucket
from jaxserve.schedule.observer import StepRecord
from jaxserve.schedule.plan import ScheduledSlice, StepPlan, StepResult
from jaxserve.schedule.replay import ScheduleLog, replay
from jaxserve.schedule.schedule_log import LogHeader, ScheduleLogError, ScheduleLogWriter
from jaxserve.schedule.sequence import Sequence
from tests.fakes import VOCAB_SIZE, FakeExecutor, FakeHandle, drain, make_engine


class RecordingExecutor(FakeExecutor):
    """Keeps every batch; `shift` makes it another model from its step number `shift_from` on."""

    def __init__(self, **options):
        super().__init__(**options)
        self.batches: list[DeviceBatch] = []
        self.shift_from: int | None = None

    def submit(self, batch: DeviceBatch) -> FakeHandle:
        self.batches.append(batch)
        if self.num_steps + 1 == self.shift_from:
            self.weights += 1
        return super().submit(batch)


class LoggedEngine:
    """An engine whose steps are logged, and what is needed to replay them."""

    def __init__(self, **options):
        self.engine: Engine = make_engine(executor_class=RecordingExecutor, **options)
        kv = self.engine.scheduler.kv
        self.made_of = {
            "num_pages": kv.pool.num_pages,
            "page_size": kv.page_size,
            "num_host_pages": kv.host.num_pages,
            "poison": options.get("poison", ()),
            "draws": options.get("draws", False),
        }
        self.executor = self.engine.executor
        self.lines: list[bytes] = []
        header = LogHeader.of(self.engine.stats(), version="0", model="m", host_kv_gib=0.5)
        writer = ScheduleLogWriter(lambda line: self.lines.append(line.encode()), header)
        self.engine.observers.append(writer)
        self.writer = writer

    def log(self) -> ScheduleLog:
        return ScheduleLog(self.lines)

    def records(self, key: str) -> list[dict]:
        return [one for one in map(json.loads, self.lines) if key in one]

    def cut_a_step_short(self) -> None:
        """As Ctrl-C behind the device; the log does not get to know of it."""
        update, self.engine.scheduler.update = self.engine.scheduler.update, cut_short
        with pytest.raises(KeyboardInterrupt):
            self.engine.step()
        self.engine.scheduler.update = update
        self.executor.batches.pop()

    def check_replay(self) -> None:
        """A replay gives the same tokens from the same batches."""
        again = RecordingExecutor(**self.made_of)
        done = replay(again, self.log())
        assert done.difference is None
        assert done.num_steps == len(self.executor.batches) == len(again.batches)
        for one, other in zip(self.executor.batches, again.batches, strict=True):
            assert_same(one, other)


def assert_same(one: DeviceBatch, other: DeviceBatch) -> None:
    for field in dataclasses.fields(DeviceBatch):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        assert np.array_equal(mine, theirs), field.name


def add(engine: Engine, name: str, prompt: list[int], num_tokens: int = 12, **fields) -> None:
    request = {key: fields.pop(key) for key in ("hold", "beam") if key in fields}
    if "beam" not in request:
        request["sampling_params"] = SamplingParams(max_tokens=num_tokens, **fields)
    engine.add(Request(id=name, prompt_token_ids=prompt, **request))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB_SIZE), k=length)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_chunks_prefix_hits_preemption_and_seeded_draws(mode):
    logged = LoggedEngine(
        num_pages=24, num_host_pages=40, draws=True, preemption_mode=mode, max_num_seqs=5
    )
    shared = prompt_of(40)
    for i in range(8):
        add(logged.engine, f"r{i}", [*shared[: 20 + 3 * i], i + 1], temperature=i % 2, seed=i)
    drain(logged.engine)
    stats = logged.engine.stats()
    assert (stats.num_swaps if mode == "swap" else stats.num_recomputes) > 0
    assert stats.num_hit_tokens > 0
    assert any("moves_in" in one for one in logged.records("step")) == (mode == "swap")
    logged.check_replay()


def test_choices_beams_and_forks():
    logged = LoggedEngine(num_pages=48, draws=True)
    engine = logged.engine
    add(engine, "choices", prompt_of(13), n=3, temperature=1.0)
    add(engine, "beams", prompt_of(7, 1), beam=BeamParams(beam_width=3, max_tokens=9))
    add(engine, "held", prompt_of(9, 2), 5, hold=True, temperature=0)
    for _ in range(8):
        engine.step()
    engine.fork("choices", "branch", num_tokens=10, append_token_ids=[5, 6], index=1)
    engine.fork("held", "again", num_tokens=11)
    drain(engine)
    assert engine.stats().num_forks > 4
    assert any("copies" in one for one in logged.records("step"))
    assert any("tokens" in one for one in logged.records("step")), "a beam's choice is told"
    logged.check_replay()


def test_aborts_failures_and_steps_cut_short():
    logged = LoggedEngine(num_pages=20, poison=(999,), max_num_seqs=4)
    engine = logged.engine
    for i in range(6):
        add(engine, f"r{i}", [*prompt_of(17, i), 999] if i == 2 else prompt_of(17, i))
    for _ in range(3):
        engine.step()
    engine.abort("r0")
    logged.cut_a_step_short()
    drain(engine)
    assert any(None in one["outcomes"] for one in logged.records("step"))
    logged.check_replay()


def cut_short(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("seed", range(6))
def test_any_run_can_be_replayed(seed):
    draw = random.Random(seed)
    logged = LoggedEngine(
        num_pages=draw.choice([26, 40, 90]),
        num_host_pages=draw.choice([0, 12, 50]),
        draws=True,
        admission=draw.choice(["fcfs", "lpm", "short_first", "priority"]),
        enable_prefix_caching=draw.random() < 0.8,
        max_num_batched_tokens=draw.choice([8, 16, 33]),
    )
    engine = logged.engine
    for i in range(60):
        kind, prompt = draw.random(), prompt_of(draw.randrange(1, 60), draw.randrange(5))
        if kind < 0.2:
            beam = BeamParams(beam_width=draw.randrange(1, 4), max_tokens=6)
            add(engine, f"r{i}", prompt, beam=beam)
        elif kind < 0.6:
            n = draw.choice([1, 1, 3])
            add(engine, f"r{i}", prompt, draw.randrange(1, 15), n=n, temperature=draw.random())
        elif kind < 0.7 and i:
            engine.abort(f"r{draw.randrange(i)}")
        for _ in range(draw.randrange(3)):
            engine.step()
        if draw.random() < 0.1 and engine.has_work():
            logged.cut_a_step_short()
    drain(engine)
    logged.check_replay()


def test_tokens_that_no_slice_of_a_beam_had():
    """It began with a chunk of its prompt and went on behind what another beam had computed."""
    kv = make_engine().scheduler.kv
    seq = Sequence(
        request=Request(id="a", prompt_token_ids=(1, 2, 3)),
        prompt_token_ids=(1, 2, 3),
        order=(0, 1),
        seed=0,
        max_tokens=9,
        stop_ids=frozenset(),
        page_table=kv.new_table(),
        wants_candidates=True,
    )
    for token in (4, 5, 6):
        seq.append(token, 0.0)
    kv.grow(seq.page_table, 6, 0)
    lines: list[bytes] = []
    stats = make_engine().stats()
    header = LogHeader.of(stats, version="0")
    writer = ScheduleLogWriter(lambda line: lines.append(line.encode()), header)
    batches = []
    for start, num_tokens, num_samples in [(0, 2, 0), (4, 2, 1)]:
        one = ScheduledSlice(seq, start, num_tokens, num_samples)
        plan = StepPlan(slices=(one,), bucket=Bucket(2, 1), num_tokens=num_tokens)
        batches.append(build_batch(plan, header.buckets, header.max_pages))
        ids = np.zeros((num_samples, 8), np.int32)
        sampled = SampledTokens(
            token_ids=ids[:, :1],
            num_tokens=np.ones(num_samples, np.int32),
            logprobs=np.zeros((num_samples, 1), np.float32),
            finite=np.ones(1, bool),
            candidate_ids=ids[:, None],
        )
        writer.step_done(StepRecord(plan, batches[-1], sampled, StepResult([], []), 0.0))
    log = ScheduleLog(lines)
    for batch, step in zip(batches, log.steps(), strict=True):
        assert_same(batch, build_batch(step.plan, log.buckets, log.max_pages))


@pytest.mark.parametrize("fails_at", [2, 5, 9])
def test_a_step_that_is_done_again(fails_at):
    """It is in the log, but the engine has taken it back: another observer failed."""
    logged = LoggedEngine(num_pages=20, draws=True)

    class Failing:
        num_steps = 0

        def step_done(self, step: StepRecord) -> None:
            self.num_steps += 1
            if self.num_steps == fails_at:
                raise OSError("busy")

        def weights_changed(self) -> None: ...

    logged.engine.observers.append(Failing())
    for i in range(4):
        add(logged.engine, f"r{i}", prompt_of(14, i), 8, temperature=1, n=1 + i % 2)
    add(logged.engine, "beams", prompt_of(7, 1), beam=BeamParams(beam_width=3, max_tokens=9))
    with pytest.raises(OSError, match="busy"):
        drain(logged.engine)
    drain(logged.engine)
    logged.check_replay()


@pytest.mark.parametrize("fails_at", range(1, 16))
def test_a_line_that_cannot_be_written_once(fails_at, monkeypatch):
    """The engine does the step again; the log goes on with all that its reader has to know."""
    logged = LoggedEngine(num_pages=20)
    (writer,) = logged.engine.observers
    calls = iter(range(1, 1000))

    def write(line: str) -> None:
        if next(calls) == fails_at:
            raise OSError("busy")
        logged.lines.append(line.encode())

    monkeypatch.setattr(writer, "_write", write)
    for i in range(4):
        add(logged.engine, f"r{i}", prompt_of(14, i), 8, temperature=0)
    with pytest.raises(OSError, match="busy"):
        drain(logged.engine)
    logged.executor.batches.pop()  # this step is not in the log
    drain(logged.engine)
    logged.check_replay()


@pytest.fixture
def small() -> LoggedEngine:
    logged = LoggedEngine(num_pages=40)
    for i in range(3):
        add(logged.engine, f"r{i}", prompt_of(9, i), 6, temperature=0)
    drain(logged.engine)
    return logged


def test_what_a_log_says(small):
    header, *_ = map(json.loads, small.lines)
    assert header["schedule_log"] == 1
    assert header["model"] == "m"
    assert header["num_pages"] == 40
    sequences = small.records("sequence")
    assert [one["request_id"] for one in sequences] == ["r0", "r1", "r2"]
    assert [one["token_ids"] for one in sequences] == [prompt_of(9, i) for i in range(3)]
    steps = small.records("step")
    assert [one["step"] for one in steps] == list(range(1, 7))
    assert steps[0]["bucket"] == [32, 4]
    assert steps[0]["slices"] == [[i, 0, 9, 1] for i in range(3)]
    assert {len(pages) for pages in steps[0]["pages"].values()} == {1 + 3}, "three pages from 0 on"
    assert "pages" not in steps[1], "nothing changed"
    assert steps[-1]["ended"] == [0, 1, 2]
    assert not any("tokens" in one or "copies" in one for one in steps)


def test_the_header_makes_an_engine_of_the_same_shapes(small):
    options = small.log().header.engine_options()
    stats = small.engine.stats()
    for name in ("num_pages", "page_size", "max_num_seqs", "max_num_batched_tokens", "dtype"):
        assert options[name] == getattr(stats, name)
    assert options["host_kv_gib"] == 0.5
    assert "model" not in options


def test_a_replay_that_differs_says_where_first(small):
    again = RecordingExecutor(**small.made_of)
    again.shift_from = 4
    done = replay(again, small.log())
    assert done.num_steps == 3
    assert done.num_tokens == 9
    found = done.difference
    assert (found.step, found.request_id, found.branch, found.position) == (4, "r0", 0, 3)
    assert f"step 4: request 'r0', branch 0, output token 3: {found.logged[0]} in the log" in str(
        found
    )


def test_a_failure_that_differs_is_told(small):
    poison = small.executor.batches[0].token_ids[5:6].tolist()
    done = replay(RecordingExecutor(**{**small.made_of, "poison": poison}), small.log())
    assert str(done.difference).endswith("in the log, NaN or infinity in the replay")


def test_a_change_of_weights_ends_what_can_be_replayed(small):
    small.engine.update_params(3)
    add(small.engine, "late", [1, 2, 3])
    drain(small.engine)
    with pytest.raises(ScheduleLogError, match="weights were changed after step 6"):
        replay(RecordingExecutor(**small.made_of), small.log())


def test_a_torn_last_line_is_passed_over(small):
    small.lines[-1] = small.lines[-1][:-5]
    assert replay(RecordingExecutor(**small.made_of), small.log()).num_steps == 5


def test_a_log_has_an_end_when_it_was_closed(small):
    assert not replay(RecordingExecutor(**small.made_of), small.log()).is_whole
    small.writer.close()
    assert json.loads(small.lines[-1]) == {"end": {"num_steps": 6}}
    done = replay(RecordingExecutor(**small.made_of), small.log())
    assert done.is_whole
    assert done.num_steps == 6


def test_a_log_whose_last_step_was_not_written_has_no_end(small):
    def fail(line: str) -> None:
        raise BrokenPipeError

    small.writer._write = fail
    add(small.engine, "late", [1, 2, 3], 1)
    with pytest.raises(BrokenPipeError):
        small.engine.step()
    small.writer.close()  # writes nothing, or this would raise


def test_an_end_that_cannot_be_is_refused(small):
    small.writer.close()
    for lines, words in (
        ([*small.lines, small.lines[-2]], "line 12: a line behind the end"),
        ([*small.lines[:-2], small.lines[-1]], "line 10: the log ends after step 5, and says 6"),
    ):
        with pytest.raises(ScheduleLogError, match=words):
            replay(RecordingExecutor(**small.made_of), ScheduleLog(lines))


def test_ended_sequences_are_forgotten(small):
    log = small.log()
    assert len(list(log.steps())) == 6
    assert log._sequences == {}


def make_batches(open_log: Callable[[], ScheduleLog]) -> None:
    """All that a replay makes of a log, with no executor to differ from it first."""
    log = open_log()
    for step in log.steps():
        build_batch(step.plan, log.buckets, log.max_pages)


def change(step: dict, path: str, value: object) -> None:
    *way, last = path.split("/")
    for key in way:
        step = step[int(key) if isinstance(step, list) else key]  # type: ignore[index]
    step[int(last) if isinstance(step, list) else last] = value  # type: ignore[index]


@pytest.mark.parametrize(
    ("line", "path", "value", "words"),
    [
        (0, "schedule_log", 2, "line 1: not the header"),
        (0, "page_size", -4, "line 1: page_size is -4"),
        (0, "page_size", "big", "line 1: page_size is 'big'"),
        (0, "page_size", 0, "line 1: page_size is 0"),
        (0, "more", 1, "line 1: .*more"),
        (1, "token_ids", "text", "line 2: expected integers"),
        (1, "temperature", -1, "line 2: temperature must be"),
        (1, "seed", None, "line 2: expected integers"),
        (1, "seed", [7], "line 2: expected integers"),
        (1, "seed", -1, r"line 2: seed -1 is not in \[0, 2"),
        (1, "seed", 2**64, "line 2: seed 18446744073709551616 is not in"),
        (4, "slices/0/0", 77, "line 5: KeyError 77"),
        (4, "slices/0/2", 0, r"line 5: slice \[0, 0, 0, 1\]"),
        (4, "slices/0/2", 10, "line 5: slice .* of a sequence of 9 tokens"),
        (4, "slices/0/2", 8, "line 5: slice .* samples before the end of 9 tokens"),
        (4, "pages/0", [0, 1], "line 5: slice .* passes its 1 pages"),
        (4, "pages/0/2", 40, r"line 5: page 40 is not in \[1, 40\)"),
        (4, "pages/0/2", 0, "line 5: page 0 is not in"),
        (4, "copies", [[3, 41]], "line 5: page 41 is not in"),
        (4, "moves_in", [[0, 3]], r"line 5: page 0 is not in \[0, 0\)"),
        (4, "bucket", [32, 3], "line 5: a step of 27 tokens and 3 rows in"),
        (4, "bucket", [16, 4], "line 5: a step of 27 tokens"),
        (4, "outcomes", [[1]], "line 5: 1 outcomes of 3 slices"),
        (4, "outcomes", 3, "line 5: "),
        (4, "outcomes/0", [2**31], "line 5: "),
        (4, "ended", 3, "line 5: "),
        (4, "ended", [[]], "line 5: "),
    ],
)
def test_a_line_at_fault_is_named(small, line, path, value, words):
    record = json.loads(small.lines[line])
    change(record, path, value)
    small.lines[line] = json.dumps(record).encode() + b"\n"
    with pytest.raises(ScheduleLogError, match=words):
        make_batches(small.log)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "line 1: not the header"),
        ([b"\n"], "line 1: "),
        ([b"[1]\n"], "line 1: not an object"),
        ([b"\xff\n"], "line 1: "),
        ([b"[" * 100000 + b"\n"], "line 1: "),
        ([b'{"id": 1}\n'], "line 1: not the header"),
    ],
)
def test_what_is_no_log_is_refused(lines, words):
    with pytest.raises(ScheduleLogError, match=words):
        ScheduleLog(lines)
