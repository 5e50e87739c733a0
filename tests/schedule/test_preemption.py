"""Preemption: the newest gives way, the first goes on, nobody is preempted for ever, and outputs are
the same in every mode.

More examples: raise `max_examples`.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.executor import StepCosts
from jaxserve.request import merge_outputs
from jaxserve.schedule.preemption import MAX_PREEMPTIONS, PreemptionMode
from jaxserve.schedule.sequence import Status
from tests.fakes import FakeExecutor, make_engine
from tests.schedule.direct import Direct
from tests.schedule.runs import Run

MODES = ["recompute", "swap", "auto"]


def crowded(num_requests: int = 4, num_tokens: int = 24, **options) -> Run:
    """Requests that do not fit beside one another to their end."""
    options = {"num_pages": 11, "max_num_seqs": 4, "num_host_pages": 40} | options
    run = Run(make_engine(**options))
    for i in range(num_requests):
        run.add(str(i), range(100 * i, 100 * i + 8), num_tokens)
    return run


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_preemption_changes_nothing(mode, caching):
    run = crowded(preemption_mode=mode, enable_prefix_caching=caching)
    run.drain()
    counters = run.engine.scheduler.counters
    assert counters.num_preemptions >= 2
    assert counters.num_preemptions == counters.num_swaps + counters.num_recomputes
    assert (counters.num_swaps > 0) is (mode != "recompute")
    assert (counters.num_recomputes > 0) is (mode == "recompute")
    run.check_outputs()
    run.check_all_pages_are_back()


def test_swapped_tokens_are_not_computed_again():
    runs = {mode: crowded(preemption_mode=mode, enable_prefix_caching=False) for mode in MODES[:2]}
    num_computed = {}
    for mode, run in runs.items():
        run.drain()
        num_computed[mode] = run.engine.executor.num_computed_tokens
    assert num_computed["swap"] == 4 * (8 + 23)
    assert num_computed["recompute"] > num_computed["swap"]


@pytest.mark.parametrize("mode", MODES)
def test_the_newest_gives_way_and_the_first_never_does(mode):
    run = crowded(preemption_mode=mode)
    preempted = set()
    while run.engine.has_work():
        before = run.ids_running()
        run.step()
        gone = [name for name in before if name in run.ids_waiting()]
        assert gone == before[len(before) - len(gone) :], "somebody newer went on running"
        preempted |= set(gone)
        if before:
            assert run.steps[before[0]][-1] == run.num_steps - 1, "the first got no token"
    assert "0" not in preempted
    assert preempted
    assert list(run.steps) == ["0", "1", "2", "3"]
    ends = [run.steps[name][-1] for name in "0123"]
    assert ends == sorted(ends)


def test_a_full_host_tier_means_recomputing_and_is_counted():
    run = crowded(num_host_pages=1, preemption_mode="swap")
    run.drain()
    counters = run.engine.scheduler.counters
    assert counters.num_swaps_refused == counters.num_recomputes == counters.num_preemptions > 0
    run.check_outputs()
    run.check_all_pages_are_back()


def test_aborting_a_swapped_request_returns_its_host_pages():
    run = crowded(preemption_mode="swap")
    host = run.engine.scheduler.kv.host
    while host.num_free == host.num_pages:
        run.step()
    (swapped,) = [seq for seq in run.sequences() if seq.host_pages is not None]
    known = run.engine.scheduler.entrance.num_cached(swapped)
    assert known == swapped.host_pages.num_tokens > 8
    run.abort(swapped.request.id)
    assert host.num_free == host.num_pages
    run.drain()
    run.check_outputs()
    run.check_all_pages_are_back()


def test_auto_picks_what_costs_less():
    costs = StepCosts(token_s=1.0, page_move_s=8.0)
    mode = PreemptionMode("auto", costs)
    assert not mode.prefers_swap(num_tokens=16, num_pages=1)
    assert mode.prefers_swap(num_tokens=17, num_pages=1)
    assert not mode.prefers_swap(num_tokens=32, num_pages=2)
    assert PreemptionMode("swap", costs).prefers_swap(1, 1)
    assert not PreemptionMode("recompute", costs).prefers_swap(1000, 1)
    with pytest.raises(ValueError, match="needs costs"):
        PreemptionMode("auto", None)


@pytest.mark.parametrize(("page_move_s", "swaps"), [(1e-9, True), (1.0, False)])
def test_auto_follows_the_costs_of_the_executor(page_move_s, swaps, monkeypatch):
    costs = property(lambda self: StepCosts(token_s=1e-3, page_move_s=page_move_s))
    monkeypatch.setattr(FakeExecutor, "costs", costs)
    run = crowded(preemption_mode="auto")
    run.drain()
    counters = run.engine.scheduler.counters
    assert (counters.num_swaps, counters.num_recomputes) == (
        (counters.num_preemptions, 0) if swaps else (0, counters.num_preemptions)
    )


def test_a_newcomer_is_not_admitted_with_the_pages_of_unfinished_prompts():
    """Two prompts of seven pages, in chunks, do not both begin in a pool of ten: the second would
    be thrown out before it is done.
    """
    run = Run(make_engine(max_num_batched_tokens=4, num_pages=11, max_num_seqs=4))
    for i in range(2):
        run.add(str(i), range(100 * i, 100 * i + 28), 3)
    run.drain()
    assert run.engine.scheduler.counters.num_preemptions == 0
    assert run.engine.executor.num_computed_tokens == 2 * (28 + 2)
    run.check_outputs()


def test_nobody_is_admitted_in_the_step_that_preempts():
    """Else it would get the pages that were just given up, if it comes before the one that gave
    them.
    """
    run = Run(make_engine(num_pages=9, max_num_seqs=2, admission="priority"))
    run.add("high", range(8), 20, priority=0)
    run.add("low", range(100, 108), 20, priority=9)
    run.step()
    run.add("middle", [5], 2, priority=5)
    low = run.sequence("low")
    while not low.num_preemptions:
        assert run.ids_waiting() == ["middle"]  # no slot
        run.step()
    assert run.ids_running() == ["high"]
    run.step()
    assert run.ids_running() == ["high", "middle"]
    run.drain()
    run.check_outputs()


def test_a_swapped_sequence_computes_nothing_that_others_computed_meanwhile():
    run = Direct(
        num_host_pages=9,
        preemption_mode="swap",
        admission="priority",
        max_num_seqs=1,
        max_num_batched_tokens=8,
    )
    swapped = run.add(range(20), 2, priority=5)
    run.step()
    run.scheduler._preempt(swapped)
    run.add(range(20), 1, priority=0)
    run.steps(2)
    assert run.seqs == [swapped]
    before = run.executor.num_computed_tokens
    run.drain()
    assert run.executor.num_computed_tokens - before == 2
    run.check_all_pages_are_back()


def test_one_that_was_preempted_often_is_admitted_for_good():
    run = Run(make_engine(num_pages=13, max_num_seqs=4))
    run.add("first", range(8), 20)
    run.step()
    run.add("victim", range(100, 108), 20)
    run.step()
    victim = run.sequence("victim")
    run.engine.scheduler._preempt(victim)
    victim.num_preemptions = MAX_PREEMPTIONS
    run.step()
    assert victim.status is Status.PREEMPTED  # 7 pages and 7 pages do not fit in 12
    while run.engine.has_work():
        run.step()
    assert victim.num_preemptions == MAX_PREEMPTIONS
    run.check_outputs()


def test_nobody_is_admitted_before_one_that_runs_for_good_unless_it_leaves_it_enough():
    """Under short_first an older sequence may be admitted later and then stands before it."""
    run = Run(make_engine(num_pages=14, max_num_seqs=4, admission="short_first"))
    run.add("blocker", range(300, 320), 2)
    run.step()
    run.add("old", range(24), 20)
    run.add("settled", range(100, 104), 28)
    settled = run.sequence("settled")
    settled.num_preemptions = MAX_PREEMPTIONS
    old = run.sequence("old")
    while settled.status is not Status.FINISHED:
        run.step()
        assert old.status is Status.WAITING
    run.drain()
    assert settled.num_preemptions == MAX_PREEMPTIONS
    run.check_outputs()


RANDOM = {
    "admission": st.sampled_from(["fcfs", "priority", "lpm", "short_first"]),
    "preemption_mode": st.sampled_from(MODES),
    "enable_prefix_caching": st.booleans(),
    "max_num_seqs": st.sampled_from([2, 4, 8]),
    "max_num_batched_tokens": st.sampled_from([8, 16, 40]),
}


@settings(max_examples=25, deadline=None)
@given(
    num_pages=st.integers(8, 20),
    sizes=st.lists(
        st.tuples(st.integers(1, 30), st.sampled_from([3, 20, 40])), min_size=4, max_size=24
    ),
    rate=st.sampled_from([1, 2, 5]),
    num_choices=st.sampled_from([1, 1, 3]),
    options=st.fixed_dictionaries(RANDOM),
)
def test_preemptions_of_a_sequence_are_bounded(num_pages, sizes, rate, num_choices, options):
    run = Run(make_engine(num_pages=num_pages, num_host_pages=30, **options))
    known = {}
    for i, (length, num_tokens) in enumerate(sizes):
        length = min(length, 4 * (num_pages - 1) // 2)
        n = num_choices if i % 3 == 0 else 1
        run.add(
            str(i), [(7 * i + j) % 1000 for j in range(length)], num_tokens, n=n, priority=i % 3
        )
        for _ in range(rate):
            run.step()
            known.update({seq.order: seq for seq in run.sequences()})
    while run.engine.has_work():
        run.step()
        known.update({seq.order: seq for seq in run.sequences()})
    assert max(seq.num_preemptions for seq in known.values()) <= MAX_PREEMPTIONS
    run.check_outputs()
    run.check_all_pages_are_back()


@settings(max_examples=150, deadline=None)
@given(
    num_pages=st.integers(2, 8),
    requests=st.lists(
        st.tuples(
            st.one_of(st.none(), st.integers(1, 28)),  # None: a prompt that fills the pool
            st.integers(1, 12),
            st.booleans(),
            st.sampled_from([1, 1, 2]),
        ),
        min_size=1,
        max_size=7,
    ),
    num_host_pages=st.sampled_from([1, 4, 20]),
    arrivals=st.integers(0, 2),
    options=st.fixed_dictionaries(
        RANDOM
        | {
            "max_num_seqs": st.integers(1, 5),
            "max_num_batched_tokens": st.sampled_from([1, 2, 5, 16, 40]),
            "scheduling": st.sampled_from(["continuous", "continuous", "static"]),
            "max_num_partial_prefills": st.sampled_from([None, 1]),
            "target_itl_s": st.sampled_from([None, 1e-9]),
        }
    ),
)
def test_everything_ends_in_tiny_pools(num_pages, requests, num_host_pages, arrivals, options):
    run = Run(make_engine(num_pages=num_pages, num_host_pages=num_host_pages, **options))
    num_slots = 4 * (num_pages - 1)
    num_tokens = 0
    for i, (length, num_outputs, is_same, n) in enumerate(requests):
        length = num_slots if length is None else min(length, num_slots)
        prompt = [(3 * j if is_same else 50 * i + j) % 1000 for j in range(length)]
        run.add(str(i), prompt, num_outputs, n=n)
        num_tokens += n * (length + num_outputs)
        run.step(arrivals)
    run.drain(max_steps=(MAX_PREEMPTIONS + 2) * num_tokens + 64 * len(requests))
    run.check_outputs()
    run.check_all_pages_are_back()
    outputs = [merge_outputs(parts) for parts in run.parts.values()]
    assert all(c.finish_reason == "length" for output in outputs for c in output.outputs)
