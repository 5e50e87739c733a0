"""Chunks: nobody stalls behind a long prompt, however the budget is shared out, and steps stay below
a target.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.schedule.buckets import Buckets
from jaxserve.schedule.chunking import (
    FORGETTING,
    StepTimer,
    share_in_order,
    share_short_first,
)
from tests.fakes import make_engine
from tests.schedule.runs import Run


def num_tokens_of(run: Run) -> dict[str, int]:
    """Tokens that each request had in the last step; requests are told apart by their first one."""
    batch = run.engine.executor.last_batch
    by_first_page = {seq.page_table[0]: seq.request.id for seq in run.sequences() if seq.page_table}
    table = batch.page_table.reshape(len(batch.kv_lens), -1)
    lengths = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    return {
        by_first_page[int(table[row, 0])]: int(lengths[row])
        for row in range(int(batch.ranges[2]))
        if int(table[row, 0]) in by_first_page
    }


def test_decode_tokens_ride_with_a_long_prompt():
    """No stall: while a long prompt is computed in chunks, the running sequence gets a token in
    every step.
    """
    run = Run(make_engine(max_num_batched_tokens=8, max_model_len=256, num_pages=128))
    run.add("short", [1, 2], 20)
    run.step()
    run.add("long", range(60), 2)
    for _ in range(5):
        run.step()
        assert run.steps["short"][-1] == run.num_steps - 1
        assert run.engine.executor.last_batch.ranges.tolist() == [1, 1, 2]
    assert "long" not in run.parts
    run.drain()
    run.check_outputs()


@pytest.mark.parametrize("admission", ["fcfs", "short_first", "lpm", "priority"])
def test_a_long_prompt_starves_nobody_and_nobody_starves_it(admission):
    """A decodes; B with 640 tokens comes, then C with 4, then a new prompt of 32 in every step."""
    run = Run(
        make_engine(
            max_num_batched_tokens=16,
            max_num_seqs=16,
            max_model_len=1024,
            num_pages=1000,
            admission=admission,
        )
    )
    run.add("A", [1], 150)
    run.step(2)
    run.add("B", range(100, 740), 2)
    run.step()
    run.add("C", range(50, 54), 2)
    run.step()
    for i in range(50):
        run.add(f"D{i}", [(37 * i + 3 * j) % 1000 for j in range(32)], 1)
        run.step()
    run.drain()
    run.check_outputs()
    assert run.gap("A") <= 2
    assert run.steps["C"][0] - run.added_at["C"] + 1 <= 4
    assert run.steps["B"][0] - run.added_at["B"] <= 4 * 640 / 16
    assert run.gap("B") <= 4 * 640 / 16


def test_at_most_so_many_prompts_are_partial_at_once():
    for limit in (1, 2, 3):
        run = Run(
            make_engine(
                max_num_batched_tokens=16,
                max_num_partial_prefills=limit,
                long_prefill_token_threshold=4,
                num_pages=100,
            )
        )
        most = 0
        for i in range(5):
            run.add(str(i), range(100 * i, 100 * i + 40), 2)
        while run.engine.has_work():
            run.step()
            partial = [s for s in run.engine.scheduler.running if s.num_tokens_to_compute > 1]
            most = max(most, len(partial))
        assert most == limit
        run.check_outputs()


def test_a_long_prompt_leaves_what_is_over_the_threshold_to_others():
    run = Run(make_engine(max_num_batched_tokens=16, long_prefill_token_threshold=6, num_pages=100))
    run.add("long", range(100, 180), 2)
    run.step()
    assert num_tokens_of(run) == {"long": 16}  # alone
    run.add("other", range(9), 3)
    run.step()
    assert num_tokens_of(run) == {"long": 7, "other": 9}  # with the one that nobody else wanted
    run.add("next", range(200, 240), 2)
    run.step()
    assert num_tokens_of(run) == {"other": 1, "long": 9, "next": 6}  # the older has what is over
    run.drain()
    run.check_outputs()


def test_a_prompt_that_fits_in_one_step_is_not_long():
    run = Run(make_engine(max_num_batched_tokens=16, long_prefill_token_threshold=2, num_pages=100))
    run.add("first", range(100, 112), 3)
    run.add("second", range(200, 216), 3)
    run.step()
    assert num_tokens_of(run) == {"first": 12, "second": 4}
    run.step()
    assert num_tokens_of(run) == {"first": 1, "second": 12}
    run.drain()
    run.check_outputs()


def test_short_first_passes_a_long_prompt_and_leaves_it_a_quarter():
    run = Run(make_engine(max_num_batched_tokens=16, admission="short_first", num_pages=100))
    run.add("long", range(100, 200), 2)
    run.step()
    run.add("short", range(11), 3)
    run.step()
    assert num_tokens_of(run) == {"long": 5, "short": 11}
    run.add("middle", range(300, 340), 2)
    run.step()
    assert num_tokens_of(run) == {"short": 1, "long": 3, "middle": 12}
    run.drain()
    run.check_outputs()


# Sharing out

remaining = st.lists(st.integers(1, 50), max_size=6)


@given(
    remaining=remaining,
    spare=st.integers(0, 60),
    long_prompt=st.integers(1, 60),
    threshold=st.integers(1, 60),
    others_wait=st.booleans(),
)
def test_shares_in_order(remaining, spare, long_prompt, threshold, others_wait):
    budget = len(remaining) + spare
    chunks = share_in_order(
        remaining, budget, long_prompt=long_prompt, threshold=threshold, others_wait=others_wait
    )
    assert len(chunks) == len(remaining)
    assert sum(chunks) <= budget
    alone = len(remaining) == 1 and not others_wait
    for left, chunk in zip(remaining, chunks, strict=True):
        assert 1 <= chunk <= left
        assert alone or left <= long_prompt or chunk <= threshold
    full = [
        chunk == left or (left > long_prompt and not alone and chunk == min(left, threshold))
        for left, chunk in zip(remaining, chunks, strict=True)
    ]
    assert sum(chunks) == budget or all(full), "tokens are left though somebody may use them"
    assert full == sorted(full, reverse=True) or 1 in chunks, "a later one was served first"


@given(
    remaining=remaining,
    spare=st.integers(0, 60),
    shortest=st.none() | st.integers(1, 50),
    reserve=st.integers(1, 20),
)
def test_shares_short_first(remaining, spare, shortest, reserve):
    budget = len(remaining) + spare
    chunks = share_short_first(remaining, budget, shortest_waiting=shortest, reserve=reserve)
    assert len(chunks) == len(remaining)
    assert sum(chunks) <= budget
    for left, chunk in zip(remaining, chunks, strict=True):
        assert 1 <= chunk <= left
    if remaining:
        assert chunks[0] >= min(remaining[0], reserve, spare + 1)
    for index, (left, chunk) in enumerate(zip(remaining, chunks, strict=True)):
        if shortest is not None and left > shortest:
            assert chunk == 1 or index == 0, "it took what a shorter one waits for"
        elif chunk < left:
            assert sum(chunks) == budget, "tokens are left though somebody may use them"


# Steps below a target


def timer(**seen: float) -> StepTimer:
    one = StepTimer(Buckets.make(max_num_seqs=4, max_num_batched_tokens=64))
    for rung, seconds in seen.items():
        one.observe(int(rung[1:]), seconds)
    return one


def test_a_timer_that_knows_nothing_begins_small_and_climbs():
    one = timer()
    asked = []
    for _ in range(9):
        asked.append(one.budget(0.1))
        one.observe(asked[-1], 0.01 * asked[-1])
    assert asked == [1, 2, 4, 8, 16, 8, 8, 8, 8]


def test_smaller_steps_that_are_never_run_do_not_hold_it_down():
    """With ten sequences decoding no step has fewer than ten tokens."""
    assert timer(t16=0.05).budget(0.1) == 32
    assert timer(t16=0.05, t32=0.2).budget(0.1) == 16
    assert timer(t64=0.05).budget(0.1) == 64


def test_with_every_step_too_slow_it_asks_for_the_smallest():
    assert timer(t8=0.2, t16=0.3).budget(0.1) == 1


def test_a_step_that_was_too_slow_is_tried_again_after_a_while():
    one = timer(t16=0.05, t32=0.2)
    asked = [one.budget(0.1) for _ in range(200)]
    first = asked.index(32)
    assert 0.2 * FORGETTING**first <= 0.1 < 0.2 * FORGETTING ** (first - 1)
    assert set(asked[:first]) == {16}
    one.observe(32, 0.2)
    assert one.budget(0.1) == 16


def test_measurements_are_smoothed():
    one = timer(t8=0.05, t16=0.05)
    one.observe(16, 0.15)
    assert one.budget(0.1) == 32  # one outlier: 0.08
    one.observe(16, 0.15)
    one.observe(16, 0.15)
    assert one.budget(0.1) == 8


class Clock:
    """Goes on by what a step takes as soon as the device has run it, however often it is read."""

    def __init__(self, seconds_per_token: float):
        self.seconds_per_token = seconds_per_token
        self.now = 0.0
        self.run: Run | None = None
        self.num_steps = 0

    def __call__(self) -> float:
        executor = None if self.run is None else self.run.engine.executor
        if executor is not None and executor.num_steps > self.num_steps:
            self.now += self.seconds_per_token * executor.last_batch.bucket.num_tokens
            self.num_steps = executor.num_steps
        return self.now


def run_with_target(target_itl_s: float | None, **options) -> tuple[Run, Clock]:
    clock = Clock(seconds_per_token=0.01)
    options = {"max_num_batched_tokens": 64, "num_pages": 200, "max_model_len": 512} | options
    run = Run(make_engine(target_itl_s=target_itl_s, clock=clock, **options))
    clock.run = run
    return run, clock


@pytest.mark.parametrize("admission", ["fcfs", "short_first"])
def test_chunks_shrink_until_steps_meet_the_target(admission):
    run, clock = run_with_target(0.1, admission=admission)
    run.add("stream", [1, 2, 3], 100)
    run.step(3)
    run.add("long", range(300, 700), 2)
    slow = 0
    while "long" not in run.parts:
        before = clock.now
        run.step()
        slow += clock.now - before > 0.1
    assert slow <= 2  # the rung above the right one is tried now and then
    assert run.steps["long"][0] <= 3 + 400 / 6
    run.drain()
    run.check_outputs()


def test_without_decoding_sequences_the_target_means_nothing():
    run, _ = run_with_target(0.01)
    run.add("long", range(128), 2)
    run.step(2)
    assert "long" in run.parts
    run.drain()


@pytest.mark.parametrize("max_num_seqs", [1, 3])
@pytest.mark.parametrize("admission", ["fcfs", "short_first", "lpm", "priority"])
def test_a_target_that_no_step_can_meet_stalls_nobody(admission, max_num_seqs):
    run, _ = run_with_target(1e-9, admission=admission, max_num_seqs=max_num_seqs)
    for i in range(5):
        run.add(str(i), range(100 * i, 100 * i + 20), 10)
        run.step()
    run.drain(max_steps=300)
    run.check_outputs()


def test_a_target_leaves_room_for_somebody_new():
    run, _ = run_with_target(1e-9)
    run.add("stream", [1], 60)
    run.step(5)
    run.add("new", range(100, 105), 2)
    run.step(12)
    assert "new" in run.parts
    assert "stream" in run.ids_running()
    run.drain()
    run.check_outputs()


def test_a_target_never_raises_the_budget():
    run, _ = run_with_target(1e-9, max_num_batched_tokens=2, max_num_seqs=2)
    for i in range(3):
        run.add(str(i), [i], 6)
    run.drain(max_steps=30)
    run.check_outputs()


@pytest.mark.parametrize("admission", ["fcfs", "short_first"])
def test_a_long_newcomer_leaves_room_for_those_behind_it_from_its_first_chunk_on(admission):
    run = Run(
        make_engine(
            max_num_batched_tokens=16, max_model_len=256, num_pages=128, admission=admission
        )
    )
    run.add("long", range(100), 2)
    run.add("short", [1, 2, 3, 4], 2)
    run.step()
    assert run.steps["short"] == [0]
    assert num_tokens_of(run) == {"long": 12, "short": 4}
    run.drain()
    run.check_outputs()


def test_a_long_newcomer_alone_gets_the_whole_step():
    run = Run(make_engine(max_num_batched_tokens=16, max_model_len=256, num_pages=128))
    run.add("long", range(100), 2)
    run.step()
    assert num_tokens_of(run) == {"long": 16}
