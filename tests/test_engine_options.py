"""Penalties and masks under everything that an engine does: tokens are those of a sequence alone, one step
at a time, with counts made anew for each token.
"""

import dataclasses
import random

import numpy as np
import pytest

from jaxserve.constraints.constraint import allow_only, allows
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.schedule.batch import DeviceBatch
from jaxserve.schedule.replay import ScheduleLog, replay
from jaxserve.schedule.schedule_log import LogHeader, ScheduleLogWriter
from tests.fakes import (
    VOCAB_SIZE,
    FakeExecutor,
    FakeHandle,
    drain,
    expected_penalised,
    expected_tokens,
    make_engine,
)
from tests.test_engine_async import MODES, Asked, merged, outcome, random_history

PENALISED = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -1.0}
ROOMY = {"async_scheduling": False, "num_decode_steps": 1}
TIGHT = {"num_pages": 14, "page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8}


class WatchfulExecutor(FakeExecutor):
    """Counts what is loaded, and the steps that await masks; knows which one does now."""

    def __init__(self, **options):
        super().__init__(**options)
        self.num_loads = self.num_masked = self.num_sent_ahead = 0
        self.awaited: FakeHandle | None = None
        self.num_waiting = 0

    def submit(self, batch: DeviceBatch) -> FakeHandle:
        assert self.awaited is None, "a step was sent while the one before it awaits masks"
        self.num_loads += len(batch.count_loads)
        handle = super().submit(batch)
        self.num_sent_ahead += batch.awaits_masks and self.num_waiting > 0
        self.num_waiting += 1
        given, taken = handle.give_masks, handle.result

        def give_masks(masks: np.ndarray) -> None:
            assert masks.dtype == np.uint32
            assert masks.shape == (batch.num_rows, -(-VOCAB_SIZE // 32))
            self.awaited = None
            given(masks)

        def result():
            self.num_waiting -= 1
            return taken()

        handle.give_masks, handle.result = give_masks, result
        if batch.awaits_masks:
            self.num_masked += 1
            self.awaited = handle
        return handle


def with_options(asked: list[Asked], seed: int) -> list[Asked]:
    """The same requests, most of them with penalties, masks or both."""
    rng = random.Random(seed)
    found = []
    for one in asked:
        fields: dict = {}
        if rng.random() < 0.5:
            fields |= {name: value for name, value in PENALISED.items() if rng.random() < 0.7}
        if rng.random() < 0.3:
            fields["min_tokens"] = rng.randrange(one.request.sampling_params.max_tokens + 1)
        if rng.random() < 0.2:
            fields["allowed_token_ids"] = rng.sample(range(VOCAB_SIZE), rng.choice([1, 7, 400]))
        if rng.random() < 0.3:
            fields["bad_words"] = [[i] for i in rng.sample(range(VOCAB_SIZE), 90)]
        request = one.request
        if request.beam is None:
            params = dataclasses.replace(request.sampling_params, **fields)
            request = dataclasses.replace(request, sampling_params=params)
        found.append(dataclasses.replace(one, request=request))
    return found


@pytest.mark.parametrize("seed", range(100, 130))
def test_outputs_are_those_of_one_step_at_a_time(seed):
    options, asked = random_history(seed)
    asked = with_options(asked, seed)
    modes = [m for m in MODES if m["num_decode_steps"] == 1 or not options["poison"]]
    truth = outcome(options, asked)
    assert truth.keys() == {one.request.id for one in asked}
    for mode in modes:
        assert outcome(options | mode, asked) == truth


def ids_of(parts: dict[str, list]) -> dict[str, dict[int, list[int]]]:
    return {
        name: {index: found[0] for index, found in merged(pieces).items()}
        for name, pieces in parts.items()
    }


@pytest.mark.parametrize("mode", [ROOMY, *MODES])
@pytest.mark.parametrize("tight", [False, True])
def test_counts_are_right_whatever_happens_between(mode, tight):
    """More sequences than slots, chunks, preemptions, forks of a prompt: each is counted as if alone."""
    pool = TIGHT if tight else {"max_num_seqs": 4}
    engine = make_engine(executor_class=WatchfulExecutor, draws=True, **pool, **mode)
    wanted: dict = {}
    for number in range(7):
        prompt = [(31 * number + 7 * i) % 40 + 8 for i in range(3 + 2 * number)]
        own = dict(list(PENALISED.items())[: 1 + number % 3]) if number != 3 else {}
        n = 3 if number == 2 else 1
        params = SamplingParams(max_tokens=16, temperature=0, n=n, **own)
        engine.add(Request(id=str(number), prompt_token_ids=prompt, sampling_params=params))
        alone = expected_penalised(prompt, 16, params) if own else expected_tokens(prompt, 16)
        wanted[str(number)] = dict.fromkeys(range(n), alone)
    assert ids_of(drain(engine)) == wanted
    assert engine.executor.num_loads >= 8
    assert (engine.stats().num_preemptions > 0) == tight


def test_a_sequence_that_goes_on_is_loaded_once():
    engine = make_engine(executor_class=WatchfulExecutor, **MODES[1])
    for name in ("a", "b"):
        params = SamplingParams(max_tokens=30, temperature=0, **PENALISED)
        engine.add(Request(id=name, prompt_token_ids=[ord(name), 5], sampling_params=params))
    drain(engine)
    assert engine.executor.num_loads == 2


@pytest.mark.parametrize("mode", [ROOMY, *MODES])
def test_counts_are_made_anew_after_a_step_that_was_cut_short(mode):
    for fails_at in range(1, 9):
        engine = make_engine(**mode)
        submit, count = engine.executor.submit, 0

        def failing(batch, submit=submit, fails_at=fails_at):
            nonlocal count
            count += 1
            handle = submit(batch)
            if count == fails_at:
                raise RuntimeError("cut short")
            return handle

        engine.executor.submit = failing
        params = SamplingParams(max_tokens=12, temperature=0, **PENALISED)
        for name in ("a", "b"):
            engine.add(Request(id=name, prompt_token_ids=[ord(name), 2], sampling_params=params))
        parts: dict[str, list[int]] = {"a": [], "b": []}
        while engine.has_work():
            try:
                outputs = engine.step()
            except RuntimeError:
                continue
            for output in outputs:
                parts[output.request_id] += output.outputs[0].token_ids
        for name, ids in parts.items():
            assert ids == expected_penalised([ord(name), 2], 12, params)


class Every:
    """Allows one residue of 3 after another, and has to be asked about all tokens in turn."""

    def __init__(self):
        self.asked: list[tuple[int, ...]] = []

    def needs_mask(self, num_output_tokens: int) -> bool:
        return num_output_tokens % 4 != 3

    def fill(self, output_token_ids, mask) -> None:
        self.asked.append(tuple(output_token_ids))
        allow_only(mask, range(len(output_token_ids) % 3, VOCAB_SIZE, 3))


def expected_masked(prompt: list[int], num_tokens: int) -> list[int]:
    """What `Every` leaves: the first allowed token from the fake model's own one on."""
    output: list[int] = []
    for position in range(num_tokens):
        (token,) = expected_tokens([*prompt, *output], 1)
        while position % 4 != 3 and token % 3 != position % 3:
            token = (token + 1) % VOCAB_SIZE
        output.append(token)
    return output


@pytest.mark.parametrize("mode", [ROOMY, *MODES])
@pytest.mark.parametrize("tight", [False, True])
def test_masks_come_when_the_tokens_before_are_known(mode, tight):
    pool = TIGHT if tight else {"max_num_seqs": 4}
    engine = make_engine(executor_class=WatchfulExecutor, **pool, **mode)
    wanted, constraints = {}, []
    for number in range(5):
        prompt = [(31 * number + 7 * i) % 40 + 8 for i in range(3 + 2 * number)]
        n = 2 if number == 2 else 1
        params = SamplingParams(max_tokens=15, temperature=0, n=n)
        engine.add(Request(id=str(number), prompt_token_ids=prompt, sampling_params=params))
        if number % 2 == 0:
            for choice in engine.requests.in_flight[str(number)].choices:
                constraints.append(Every())
                choice.seq.constraints = (constraints[-1],)
        ids = (expected_tokens if number % 2 else expected_masked)(prompt, 15)
        wanted[str(number)] = dict.fromkeys(range(n), ids)
    assert ids_of(drain(engine)) == wanted
    executor = engine.executor
    assert executor.num_masked > 0
    assert (executor.num_sent_ahead > 0) == mode["async_scheduling"]
    assert all(len(one.asked) >= 11 for one in constraints)


def test_several_steps_in_one_end_where_a_mask_is_needed():
    engine = make_engine(executor_class=WatchfulExecutor, num_decode_steps=4)
    params = SamplingParams(max_tokens=12, temperature=0, min_tokens=3, stop_token_ids=[1])
    engine.add(Request(id="a", prompt_token_ids=[4, 5], sampling_params=params))
    sizes = []
    while engine.has_work():
        sizes.append(sum(len(one.token_ids) for o in engine.step() for one in o.outputs))
    assert sizes[:3] == [1, 1, 1]
    assert max(sizes[3:]) == 4
    assert engine.executor.num_masked == 3


def test_rows_that_have_ended_may_sample_everything():
    """A step sent ahead for a sequence that ends in the step before: its constraint is not asked."""
    engine = make_engine(executor_class=WatchfulExecutor, async_scheduling=True)
    prompt = [9, 9, 4]
    first = expected_masked(prompt, 1)
    params = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=first)
    engine.add(Request(id="a", prompt_token_ids=prompt, sampling_params=params))
    seen: list[np.ndarray] = []
    constraint = Every()
    (choice,) = engine.requests.in_flight["a"].choices
    choice.seq.constraints = (constraint,)
    submit = engine.executor.submit

    def watched(batch):
        handle = submit(batch)
        given = handle.give_masks

        def give_masks(masks):
            seen.append(masks)
            given(masks)

        handle.give_masks = give_masks
        return handle

    engine.executor.submit = watched
    assert ids_of(drain(engine)) == {"a": {0: first}}
    assert constraint.asked == [()]
    assert len(seen) == 2
    assert [allows(masks[0], 2) for masks in seen] == [False, True]
    assert all(allows(seen[1][0], i) for i in range(VOCAB_SIZE))


@pytest.mark.parametrize("mode", [ROOMY, *MODES])
def test_a_replay_has_the_penalties_and_the_masks(mode):
    options, asked = random_history(105)
    options |= {"poison": ()}
    asked = with_options(asked, 3)
    engine = make_engine(**(options | mode))
    lines: list[bytes] = []
    header = LogHeader.of(engine.stats(), version="0")
    writer = ScheduleLogWriter(lambda line: lines.append(line.encode()), header)
    engine.observers.append(writer)
    for one in asked:
        engine.add(one.request)
    drain(engine)
    writer.close()
    assert any(b'"masks"' in line for line in lines)
    assert any(b'"repetition_penalty"' in line for line in lines)
    kv = engine.scheduler.kv
    executor = FakeExecutor(
        num_pages=kv.pool.num_pages,
        page_size=kv.page_size,
        num_host_pages=kv.host.num_pages,
        draws=True,
    )
    done = replay(executor, ScheduleLog(lines))
    assert done.difference is None
    assert done.is_whole
