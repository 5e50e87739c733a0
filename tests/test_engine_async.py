"""Steps sent before the last one's result is known, and several decode steps in one: outputs are the
same as one step at a time, whatever happens inside the lag.
"""

import dataclasses
import random
import sys

import numpy as np
import pytest

from jaxserve.request import Request
from jaxserve.sampling_params import BeamParams, SamplingParams
from jaxserve.schedule.batch import DeviceBatch, SampledTokens
from jaxserve.schedule.batch_builder import BatchBuilder
from jaxserve.text.watcher import Observation
from tests.fakes import FakeExecutor, FakeHandle, drain, expected_tokens, make_engine

MODES = [
    {"async_scheduling": False, "num_decode_steps": 3},
    {"async_scheduling": True, "num_decode_steps": 1},
    {"async_scheduling": True, "num_decode_steps": 4},
]


class LateExecutor(FakeExecutor):
    """Notes how many steps were sent whose result nobody has asked for yet."""

    def __init__(self, **options):
        super().__init__(**options)
        self.num_waiting = self.most_waiting = 0

    def submit(self, batch: DeviceBatch) -> FakeHandle:
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        handle = super().submit(batch)
        taken = handle.result

        def result() -> SampledTokens:
            self.num_waiting -= 1
            return taken()

        handle.result = result
        return handle


class NoModel(FakeExecutor):
    """Samples token 1 everywhere, in as many calls for many rows as for few."""

    def submit(self, batch: DeviceBatch) -> FakeHandle:
        rows = batch.num_rows
        return FakeHandle(
            SampledTokens(
                token_ids=np.ones((rows, 1), np.int32),
                num_tokens=np.ones(rows, np.int32),
                logprobs=np.zeros((rows, 1), np.float32),
                finite=np.ones(int(batch.ranges[2]), bool),
            )
        )


class StopAfter:
    """A watcher that holds every second token back and stops at a token of its own choice."""

    def __init__(self, divisor: int):
        self.divisor = divisor
        self.held = 0

    def observe(self, token_ids):
        (token_id,) = token_ids
        self.held += 1
        if token_id % self.divisor == 0:
            released, self.held = self.held, 0
            return Observation(
                text=f"<{token_id}>", num_tokens=released, stop_reason="stop", stopped=True
            )
        if self.held < 2:
            return Observation(text="", num_tokens=0, stop_reason=None, stopped=False)
        released, self.held = self.held, 0
        return Observation(
            text=f"<{token_id}>", num_tokens=released, stop_reason=None, stopped=False
        )

    def flush(self):
        released, self.held = self.held, 0
        return Observation(text=".", num_tokens=released, stop_reason=None, stopped=False)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request of a random history."""

    request: Request
    at_step: int
    stop_divisor: int | None = None
    abort_after: int | None = None  # output tokens


def random_history(seed: int) -> tuple[dict, list[Asked]]:
    """(engine options, requests): chunks, shared prefixes, tight pools, swaps, stops, choices,
    beams, aborts."""
    rng = random.Random(seed)
    page_size = rng.choice([4, 8])
    options = {
        "page_size": page_size,
        "num_pages": rng.choice([64, 200]) * 4 // page_size,
        "num_host_pages": rng.choice([0, 40]),
        "max_num_batched_tokens": rng.choice([8, 16, 48]),
        "max_num_seqs": rng.choice([2, 5, 8]),
        "enable_prefix_caching": rng.random() < 0.7,
        "admission": rng.choice(["fcfs", "short_first", "lpm"]),
        "draws": True,
        "poison": (7,) if rng.random() < 0.3 else (),
        "eos_token_ids": range(0, 1000, 23),
    }
    stem = [rng.randrange(8, 1000) for _ in range(24)]
    asked = []
    for number in range(rng.randrange(3, 12)):
        prompt = stem[: rng.randrange(0, 24)] + [
            rng.randrange(8, 1000) for _ in range(rng.randrange(1, 30))
        ]
        max_tokens = rng.randrange(1, 40)
        kind = rng.random()
        fields: dict = {
            "sampling_params": SamplingParams(
                max_tokens=max_tokens,
                temperature=rng.choice([0.0, 1.0]),
                seed=number,
                n=rng.choice([1, 1, 3]) if kind > 0.2 else 1,
                ignore_eos=rng.random() < 0.5,
                stop_token_ids=[rng.randrange(1000) for _ in range(20)],
            )
        }
        divisor = None
        if kind < 0.15:
            fields = {"beam": BeamParams(beam_width=3, max_tokens=min(max_tokens, 10))}
        elif fields["sampling_params"].n == 1 and rng.random() < 0.4:
            divisor = rng.choice([11, 40])
        fields["hold"] = "beam" not in fields and rng.random() < 0.3
        asked.append(
            Asked(
                Request(id=f"r{number}", prompt_token_ids=prompt, **fields),
                at_step=rng.randrange(0, 20),
                stop_divisor=divisor,
            )
        )
    return options, asked


def outcome(options: dict, asked: list[Asked]) -> dict:
    """By request and choice: (ids, text, logprobs, finish_reason, stop_reason)."""
    engine = make_engine(**options)
    waiting = sorted(asked, key=lambda one: one.at_step)
    parts: dict[str, list] = {}
    step = 0
    while waiting or engine.has_work():
        while waiting and waiting[0].at_step <= step:
            one = waiting.pop(0)
            engine.add(
                one.request, None if one.stop_divisor is None else StopAfter(one.stop_divisor)
            )
        for output in engine.step():
            parts.setdefault(output.request_id, []).append(output)
        engine.check_invariants()
        step += 1
        assert step < 5000
    return {name: merged(pieces) for name, pieces in parts.items()}


def merged(pieces: list) -> dict:
    found: dict[int, list] = {}
    for one in (one for piece in pieces for one in piece.outputs):
        ids, text, logprobs, *_ = found.get(one.index, [[], "", []])
        found[one.index] = [
            ids + list(one.token_ids),
            text + one.text,
            logprobs + list(one.logprobs or []),
            one.finish_reason,
            one.stop_reason,
        ]
    assert [piece.finished for piece in pieces].index(True) == len(pieces) - 1
    return found


@pytest.mark.parametrize("seed", range(60))
def test_outputs_are_those_of_one_step_at_a_time(seed):
    options, asked = random_history(seed)
    # A window of several steps is given up as a whole where one of them fails.
    modes = [m for m in MODES if m["num_decode_steps"] == 1 or not options["poison"]]
    truth = outcome(options, asked)
    assert truth.keys() == {one.request.id for one in asked}
    for mode in modes:
        assert outcome(options | mode, asked) == truth


@pytest.mark.parametrize("mode", MODES)
def test_the_next_step_is_sent_before_the_last_is_known(mode):
    engine = make_engine(executor_class=LateExecutor, **mode)
    prompts = {f"r{i}": list(range(8 + i, 20 + i)) for i in range(3)}
    for name, prompt in prompts.items():
        params = SamplingParams(max_tokens=20, temperature=0)
        engine.add(Request(id=name, prompt_token_ids=prompt, sampling_params=params))
    parts = drain(engine)
    for name, prompt in prompts.items():
        ids = [i for part in parts[name] for one in part.outputs for i in one.token_ids]
        assert ids == expected_tokens(prompt, 20)
    assert engine.executor.most_waiting == (2 if mode["async_scheduling"] else 1)
    # All that was sent for nothing: nobody ended early, so nothing.
    assert engine.executor.num_waiting == 0
    assert engine.executor.num_computed_tokens == 3 * (12 + 19)


def test_a_beam_waits_for_its_candidates():
    engine = make_engine(executor_class=LateExecutor, async_scheduling=True)
    engine.add(
        Request(id="b", prompt_token_ids=[9, 8, 7], beam=BeamParams(beam_width=3, max_tokens=8))
    )
    drain(engine)
    assert engine.executor.most_waiting == 1


@pytest.mark.parametrize("after", range(1, 9))
@pytest.mark.parametrize("mode", MODES)
def test_an_abort_inside_the_lag_leaves_the_others_alone(mode, after):
    engine = make_engine(**mode)
    for name in ("gone", "stays"):
        params = SamplingParams(max_tokens=30, temperature=0)
        engine.add(
            Request(id=name, prompt_token_ids=[ord(c) for c in name], sampling_params=params)
        )
    parts: dict[str, list] = {"gone": [], "stays": []}
    for _ in range(after):
        for output in engine.step():
            parts[output.request_id] += output.outputs[0].token_ids
    last = engine.abort("gone")
    engine.check_invariants()
    assert last is not None
    # The same name again, while the step that still computes for the first is under way.
    again = SamplingParams(max_tokens=5, temperature=0)
    engine.add(Request(id="gone", prompt_token_ids=[3, 4, 5], sampling_params=again))
    more = drain(engine)
    gone = expected_tokens([ord(c) for c in "gone"], 30)
    assert parts["gone"] == gone[: len(parts["gone"])]
    ids = [i for part in more["gone"] for one in part.outputs for i in one.token_ids]
    assert ids == expected_tokens([3, 4, 5], 5)
    rest = [i for part in more["stays"] for one in part.outputs for i in one.token_ids]
    assert parts["stays"] + rest == expected_tokens([ord(c) for c in "stays"], 30)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("after", range(1, 6))
def test_other_weights_come_between_two_steps(mode, after):
    """What was sent with the old weights is taken in before the new ones are put."""
    found = []
    for options in ({}, mode):
        engine = make_engine(**options)
        params = SamplingParams(max_tokens=24, temperature=0)
        engine.add(Request(id="r", prompt_token_ids=[5, 6, 7], sampling_params=params))
        ids: list[int] = []
        while len(ids) < after:
            ids += [i for o in engine.step() for i in o.outputs[0].token_ids]
        engine.update_params(1)
        engine.check_invariants()
        parts = drain(engine)
        ids += [i for part in parts["r"] for one in part.outputs for i in one.token_ids]
        found.append(ids)
        assert engine.stats().num_output_tokens == 24
    old = expected_tokens([5, 6, 7], 24)
    # Those sampled before are the old model's; then the new one goes on from them.
    num_old = next((i for i, (a, b) in enumerate(zip(found[1], old, strict=True)) if a != b), 24)
    assert after <= num_old
    assert len(found[1]) == 24


@pytest.mark.parametrize("mode", MODES)
def test_a_branch_starts_from_what_is_known(mode):
    engine = make_engine(**mode)
    params = SamplingParams(max_tokens=20, temperature=0)
    engine.add(Request(id="root", prompt_token_ids=[5, 6, 7], sampling_params=params))
    ids: list[int] = []
    while len(ids) < 5:
        ids += [i for o in engine.step() for i in o.outputs[0].token_ids]
    engine.fork("root", "branch", append_token_ids=[99], num_tokens=3 + 4)
    engine.check_invariants()
    parts = drain(engine)
    branch = [i for part in parts["branch"] for one in part.outputs for i in one.token_ids]
    prompt = [5, 6, 7, *expected_tokens([5, 6, 7], 4), 99]
    assert branch == expected_tokens(prompt, 20)


def test_several_steps_in_one_only_while_all_decode_and_nobody_waits():
    engine = make_engine(num_decode_steps=8, max_num_seqs=2)
    sizes = []

    class Watching:
        def step_done(self, step):
            sizes.append((step.plan.num_steps, len(engine.scheduler.waiting)))

        def weights_changed(self):
            raise AssertionError

    engine.observers.append(Watching())
    for i, max_tokens in enumerate((12, 30, 9)):
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        engine.add(Request(id=f"r{i}", prompt_token_ids=[i, 1, 2], sampling_params=params))
    drain(engine)
    assert all(steps == 1 for steps, waiting in sizes if waiting)
    assert max(steps for steps, _ in sizes) == 8
    assert engine.executor.num_computed_tokens == 9 + 11 + 29 + 8


def test_following_batches_go_on_from_what_was_sampled():
    engine = make_engine(num_decode_steps=3, async_scheduling=True)
    params = SamplingParams(max_tokens=20, temperature=0)
    engine.add(Request(id="r", prompt_token_ids=[5, 6, 7], sampling_params=params))
    drain(engine)
    batch = engine.executor.last_batch
    assert batch.num_steps == 1
    chunk = make_engine()
    chunk.add(Request(id="r", prompt_token_ids=[5, 6, 7], sampling_params=params))
    chunk.step()
    with pytest.raises(ValueError, match="only a batch whose rows all sample"):
        chunk.executor.last_batch.following()
    assert np.array_equal(batch.following().positions[:1], batch.positions[:1] + 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_failing_step_under_way_loses_nothing(mode):
    """The executor raises once for each step in turn; all tokens come all the same."""
    for fails_at in range(1, 12):
        engine = make_engine(**mode)
        results = iter(range(1, 10_000))

        def submit(batch, sent=engine.executor.submit, results=results, fails_at=fails_at):
            handle = sent(batch)
            taken = handle.result

            def result():
                if next(results) == fails_at:
                    raise RuntimeError("the device is gone")
                return taken()

            handle.result = result
            return handle

        engine.executor.submit = submit
        params = SamplingParams(max_tokens=10, temperature=0)
        for name in ("a", "b"):
            engine.add(Request(id=name, prompt_token_ids=[ord(name), 2], sampling_params=params))
        parts: dict[str, list[int]] = {"a": [], "b": []}
        num_failures = 0
        while engine.has_work():
            try:
                outputs = engine.step()
            except RuntimeError:
                num_failures += 1
                continue
            for output in outputs:
                parts[output.request_id] += output.outputs[0].token_ids
        assert num_failures <= 1
        for name, ids in parts.items():
            assert ids == expected_tokens([ord(name), 2], 10)


def test_a_step_that_nobody_waited_for_takes_no_time():
    """One is under way when the last sequence ends by a stop; the engine may then be idle for long."""
    now = [0.0]
    seconds: list[float] = []
    engine = make_engine(async_scheduling=True, clock=lambda: now[0])
    engine.scheduler.observe_step = lambda plan, took: seconds.append(took)
    records = CountSteps()
    engine.observers.append(records)
    stop = expected_tokens([5, 2], 3)[-1]
    params = SamplingParams(max_tokens=10, temperature=0, stop_token_ids=[stop])
    for name in ("a", "b"):
        engine.add(Request(id=name, prompt_token_ids=[5, 2], sampling_params=params))
        while engine.has_work():
            now[0] += 1
            engine.step()
        now[0] += 1000  # nobody asks for anything
    assert records.num_void > 0
    assert seconds
    assert max(seconds + records.seconds) < 10


class CountSteps:
    """An observer that notes how long steps took, and how many of them advanced nobody."""

    def __init__(self):
        self.seconds: list[float] = []
        self.num_void = 0

    def step_done(self, record):
        self.seconds.append(record.seconds)
        self.num_void += not record.result.advanced


def test_a_batch_depends_on_its_plan_alone(monkeypatch):
    """What the builder carries from step to step is what it would make anew."""
    carried = BatchBuilder.__call__
    num_shared = [0]

    def checked(self, plan):
        last = self._table
        batch, fresh = carried(self, plan), carried(BatchBuilder(*self.made_of), plan)
        for field in dataclasses.fields(DeviceBatch):
            mine, theirs = getattr(batch, field.name), getattr(fresh, field.name)
            assert np.array_equal(mine, theirs), field.name
        num_shared[0] += batch.page_table is last
        return batch

    def init(self, buckets, max_pages, real=BatchBuilder.__init__):
        self.made_of = (buckets, max_pages)
        real(self, buckets, max_pages)

    monkeypatch.setattr(BatchBuilder, "__init__", init)
    monkeypatch.setattr(BatchBuilder, "__call__", checked)
    for seed in range(60, 80):
        options, asked = random_history(seed)
        assert outcome(options | MODES[seed % 3], asked).keys() == {one.request.id for one in asked}
    assert num_shared[0] > 100, "nothing was carried over"


@pytest.mark.parametrize(
    ("scheduling", "num_steps"),
    [("continuous", 6), ("static", 6 + 3)],  # 2 | 6 | 4 tokens in two slots
)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_who_waits_takes_the_slot_of_one_whose_last_token_is_on_its_way(
    scheduling, num_steps, async_scheduling
):
    engine = make_engine(max_num_seqs=2, scheduling=scheduling, async_scheduling=async_scheduling)
    asked = {"short": 2, "long": 6, "late": 4 if scheduling == "continuous" else 3}
    for name, max_tokens in asked.items():
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        engine.add(Request(id=name, prompt_token_ids=[1, 2], sampling_params=params))
    most_running = 0
    while engine.has_work():
        engine.step()
        engine.check_invariants()
        most_running = max(most_running, len(engine.scheduler.running))
        plan = engine.scheduler.counters.last_plan
        assert plan is not None
        assert len(plan.slices) <= 2
    assert engine.stats().num_steps == num_steps
    assert most_running == 2  # the one that ends is gone by the end of the step


def test_the_work_of_a_step_grows_with_the_running_and_not_with_the_waiting():
    """Calls of Python functions, counted: no clock."""

    def calls(num_running: int, num_waiting: int) -> int:
        engine = make_engine(
            max_num_seqs=num_running,
            max_num_batched_tokens=512,
            num_pages=40 * num_running,
            page_size=16,
            max_model_len=256,
            executor_class=NoModel,
            async_scheduling=True,
        )
        params = SamplingParams(max_tokens=200, temperature=0)
        for i in range(num_running + num_waiting):
            engine.add(
                Request(id=f"r{i}", prompt_token_ids=[i % 999 + 1, 5], sampling_params=params)
            )
        for _ in range(6):
            engine.step()
        assert len(engine.scheduler.running) == num_running
        count = 0

        def profile(frame, event, argument):
            nonlocal count
            count += event == "call"

        sys.setprofile(profile)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
        return count

    few, many = calls(8, 0), calls(64, 0)
    assert few < many <= 8 * few
    assert calls(8, 1000) <= few + 10


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({"num_pages": 13, "max_num_seqs": 4, "max_num_batched_tokens": 7}, [(36, 5), (5, 5)]),
        ({"num_pages": 9, "max_num_seqs": 2, "max_num_batched_tokens": 64}, [(5, 9), (18, 4)]),
        ({"num_pages": 8, "max_num_seqs": 2, "max_num_batched_tokens": 7}, [(1, 9), (12, 7)]),
    ],
)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_who_gives_way_while_its_last_step_is_under_way_is_held_all_the_same(
    options, lengths, mode
):
    """It has no pages then: a branch of it computes them again."""
    engine = make_engine(async_scheduling=True, num_host_pages=40, preemption_mode=mode, **options)
    prompts = {}
    for number, (num_prompt_tokens, max_tokens) in enumerate(lengths):
        begin = 100 * number + 10
        prompts[str(number)] = [*range(begin, begin + num_prompt_tokens)]
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        engine.add(
            Request(
                id=str(number),
                prompt_token_ids=prompts[str(number)],
                sampling_params=params,
                hold=True,
            )
        )
    for (name, parts), (_, max_tokens) in zip(sorted(drain(engine).items()), lengths, strict=True):
        known = prompts[name] + expected_tokens(prompts[name], max_tokens)
        assert prompts[name] + merged(parts)[0][0] == known
        prompts[name] = known
    assert engine.stats().num_preemptions
    for name in prompts:
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        engine.fork(name, f"of {name}", sampling_params=params)
        branch = drain(engine)[f"of {name}"]
        assert merged(branch)[0][0] == expected_tokens(prompts[name], 2)
        engine.abort(name)
    engine.check_invariants()
    assert engine.stats().num_owned_pages == 0
