"""Who of the waiting comes first: the order of each policy, and that nobody waits for ever.

More examples: raise `max_examples`.
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.schedule import queue
from jaxserve.schedule.queue import PATIENCE, POLICIES, WaitingQueue
from jaxserve.schedule.sequence import Sequence
from tests.fakes import make_engine
from tests.schedule.runs import Run, request

BUDGETS = [1, 3, 8, 32]


def order_of_starts(run: Run) -> list[str]:
    run.drain()
    run.check_outputs()
    return list(run.parts)


# First come, first served


@settings(max_examples=80, deadline=None)
@given(
    num_pages=st.integers(4, 16),
    requests=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 16), st.booleans(), st.integers(0, 3)),
        min_size=2,
        max_size=12,
    ),
    num_host_pages=st.sampled_from([1, 20]),
    max_num_seqs=st.integers(1, 6),
    budget=st.sampled_from(BUDGETS),
    mode=st.sampled_from(["recompute", "swap"]),
    max_num_partial_prefills=st.sampled_from([None, 1, 4]),
    caching=st.booleans(),
)
def test_under_fcfs_a_later_request_never_runs_in_more_steps_than_an_earlier_one(
    num_pages,
    requests,
    num_host_pages,
    max_num_seqs,
    budget,
    mode,
    max_num_partial_prefills,
    caching,
):
    """Compared while both are in flight: pressure, chunks, waiting for prefixes, whatever happens."""
    run = Run(
        make_engine(
            num_pages=num_pages,
            num_host_pages=num_host_pages,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            preemption_mode=mode,
            max_num_partial_prefills=max_num_partial_prefills,
            enable_prefix_caching=caching,
        )
    )

    def later_ones_are_behind() -> None:
        in_flight = run.sequences()
        for earlier, later in itertools.pairwise(in_flight):
            assert later.num_iterations <= earlier.num_iterations

    run.after_step = later_ones_are_behind
    for i, (length, num_tokens, is_same, num_steps) in enumerate(requests):
        length = min(length, 4 * (num_pages - 1))
        run.add(str(i), [j if is_same else 50 * i + j for j in range(length)], num_tokens)
        run.step(num_steps)
    run.drain()
    run.check_outputs()


# Priority


def test_the_smallest_priority_comes_first_and_then_the_oldest():
    run = Run(make_engine(max_num_seqs=1, admission="priority"))
    for name, priority in (("a", 2), ("b", 0), ("c", 1), ("d", 0), ("e", -1)):
        run.add(name, [1, 2, 3], 3, priority=priority)
    assert order_of_starts(run) == ["e", "b", "d", "c", "a"]


def test_without_the_policy_priorities_mean_nothing():
    run = Run(make_engine(max_num_seqs=1))
    for name, priority in (("a", 2), ("b", 0)):
        run.add(name, [1, 2, 3], 3, priority=priority)
    assert order_of_starts(run) == ["a", "b"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_largest_priority_gives_way_first_though_it_is_older(mode):
    run = Run(
        make_engine(
            num_pages=11, max_num_seqs=3, admission="priority", preemption_mode=mode,
            num_host_pages=20,
        )
    )  # fmt: skip
    for name, priority in (("low", 5), ("middle", 3), ("high", 1)):
        run.add(name, range(100 * priority, 100 * priority + 8), 24, priority=priority)
        run.step()
    assert run.ids_running() == ["high", "middle", "low"]
    low, middle, high = (run.sequence(name) for name in ("low", "middle", "high"))
    run.drain()
    run.check_outputs()
    assert low.num_preemptions >= 1
    assert high.num_preemptions == 0
    assert run.steps["high"][-1] < run.steps["middle"][-1] < run.steps["low"][-1]
    assert middle.num_preemptions <= low.num_preemptions


def test_a_preempted_request_of_low_priority_waits_for_those_of_high_priority():
    run = Run(make_engine(num_pages=9, max_num_seqs=2, admission="priority"))
    run.add("low", range(8), 20, priority=5)
    run.step()
    run.add("first", range(100, 108), 20, priority=0)
    while not run.sequence("low").num_preemptions:
        run.step()
    run.add("second", range(200, 208), 20, priority=0)
    run.drain()
    run.check_outputs()
    assert run.steps["second"][-1] < run.steps["low"][-1]


# Longest prefix match


def test_the_longest_cached_prefix_comes_first_and_then_the_oldest():
    run = Run(make_engine(max_num_seqs=1, admission="lpm"))
    run.add("known", range(20), 2)
    run.drain()
    run.add("nothing", range(500, 520), 2)
    run.add("half", [*range(8), 7, 7, 7], 2)
    run.add("most", [*range(16), 7, 7, 7], 2)
    run.add("nothing too", range(600, 604), 2)
    assert order_of_starts(run)[1:] == ["most", "half", "nothing", "nothing too"]


def test_what_is_cached_is_looked_up_again_in_every_step():
    run = Run(make_engine(max_num_seqs=1, admission="lpm"))
    run.add("running", range(20), 4)
    run.step()
    run.add("other", range(500, 520), 2)
    run.add("follows", [*range(20), 7], 2)
    assert order_of_starts(run) == ["running", "follows", "other"]


def test_only_the_oldest_are_looked_up(monkeypatch):
    monkeypatch.setattr(queue, "LPM_WINDOW", 2)
    run = Run(make_engine(max_num_seqs=1, admission="lpm"))
    run.add("known", range(20), 2)
    run.drain()
    for name, first in (("a", 500), ("b", 600), ("c", 700)):
        run.add(name, range(first, first + 4), 2)
    run.add("hit", range(20), 2)
    assert order_of_starts(run)[1:] == ["a", "b", "hit", "c"]


# The shortest


def test_the_shortest_comes_first_and_then_the_oldest():
    run = Run(make_engine(max_num_seqs=1, admission="short_first"))
    for name, length in (("a", 9), ("b", 4), ("c", 4), ("d", 2)):
        run.add(name, range(length), 2)
    assert order_of_starts(run)[:3] == ["d", "b", "c"]


@pytest.mark.parametrize("admission", ["short_first", "lpm"])
def test_an_endless_stream_of_others_delays_nobody_for_ever(admission):
    """Every fourth admission is for the oldest."""
    run = Run(make_engine(max_num_seqs=1, admission=admission, num_pages=100))
    run.add("known", [1, 2, 3, 4], 1)
    run.step()
    for i in range(4):
        run.add(f"before {i}", [1, 2, 3, 4, 5], 2)
    run.add("long", range(100, 130), 2)
    for i in range(40):
        run.add(str(i), [1, 2, 3, 4, 5], 2)
        run.step(2)
    started = list(run.parts)
    assert started.index("long") <= 1 + 4 + PATIENCE
    run.drain()
    run.check_outputs()


def test_fcfs_and_priority_overtake_nobody_for_ever():
    assert {name for name, kind in POLICIES.items() if kind().overtakes} == {"lpm", "short_first"}


# The queue itself


def sequence(arrival: int, length: int, priority: int) -> Sequence:
    return Sequence(
        request=request(str(arrival), range(length), 1, priority=priority),
        prompt_token_ids=tuple(range(length)),
        order=(arrival, 0),
        seed=0,
        max_tokens=1,
        stop_ids=frozenset(),
        page_table=None,  # type: ignore[arg-type]
    )


@settings(max_examples=60, deadline=None)
@given(
    admission=st.sampled_from(sorted(POLICIES)),
    operations=st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "admit", "remove", "again"]), st.integers(0, 99)
        ),
        max_size=60,
    ),
)
def test_a_queue_against_a_sorted_list(admission, operations):
    policy = POLICIES[admission]()
    waiting, model, gone = WaitingQueue(policy), [], []
    num_overtaken = 0
    num_cached = {}
    for number, (what, pick) in enumerate(operations):
        if what == "push":
            one = sequence(number, 1 + pick % 5, pick % 3)
            num_cached[one] = pick % 4
            waiting.push(one)
            model.append(one)
        elif what == "again" and gone:
            one = gone.pop(pick % len(gone))
            waiting.push(one)
            model.append(one)
        elif what == "remove" and model:
            one = model.pop(pick % len(model))
            waiting.remove(one)
            gone.append(one)
        elif what == "admit" and model:
            keys = {
                "fcfs": lambda one: one.order,
                "priority": lambda one: (one.request.priority, one.order),
                "short_first": lambda one: (len(one.token_ids), one.order),
                "lpm": lambda one: (-num_cached[one], one.order),
            }
            expected = sorted(model, key=keys[admission])
            oldest = min(model, key=lambda one: one.order)
            if policy.overtakes and num_overtaken >= PATIENCE - 1:
                expected.insert(0, oldest)
            assert list(waiting.candidates(num_cached.__getitem__)) == expected
            waiting.admit(expected[0])
            model.remove(expected[0])
            gone.append(expected[0])
            num_overtaken = 0 if expected[0] is oldest else num_overtaken + 1
        waiting.check_invariants()
        assert set(waiting) == set(model)
        assert len(waiting) == len(model)
        assert all(one in waiting for one in model)
    for one in gone:
        with pytest.raises(ValueError, match="does not wait"):
            waiting.remove(one)
