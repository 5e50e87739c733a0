"""Ladders proposed for a workload are the best there are, and legal."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.schedule.bucket_choice import (
    MAX_SIZES,
    padding_share,
    suggest_buckets,
    suggest_ladder,
)
from jaxserve.schedule.buckets import Buckets

LIMIT = 12
SIZES = st.dictionaries(st.integers(1, LIMIT), st.integers(1, 9), max_size=7)


def padding(sizes, rungs) -> int:
    return sum(count * (min(r for r in rungs if r >= size) - size) for size, count in sizes.items())


@given(SIZES, st.integers(1, 5))
def test_no_other_ladder_pads_less(sizes, num_rungs):
    found = suggest_ladder(sizes, LIMIT, num_rungs)
    assert found == tuple(sorted(set(found)))
    assert found[-1] == LIMIT
    assert len(found) <= num_rungs
    others = itertools.chain.from_iterable(
        itertools.combinations(range(1, LIMIT), n) for n in range(num_rungs)
    )
    assert padding(sizes, found) == min(padding(sizes, (*rungs, LIMIT)) for rungs in others)


@given(SIZES, st.integers(0, 40))
def test_a_rung_is_worth_its_cost(sizes, cost):
    found = suggest_ladder(sizes, LIMIT, LIMIT, cost)
    for rung in found[:-1]:
        without = tuple(other for other in found if other != rung)
        assert padding(sizes, without) - padding(sizes, found) >= max(cost, 1)


def test_a_steady_batch_gets_a_rung_of_its_own():
    assert suggest_ladder({13: 1000, 512: 10, 100: 1}, 512, 3) == (13, 100, 512)
    assert suggest_ladder({13: 1000, 512: 10, 100: 1}, 512, 2) == (13, 512)
    assert suggest_ladder({13: 1000, 512: 10, 100: 1}, 512, 3, rung_cost=1000) == (13, 512)
    assert suggest_ladder({}, 512, 3) == (512,)


def test_steps_without_rows_count_for_the_tokens_alone():
    steps = Counter({(30, 0): 9, (3, 3): 9})
    found = suggest_buckets(
        steps, max_num_seqs=64, max_num_batched_tokens=32, num_token_rungs=3, num_row_rungs=3
    )
    assert found == Buckets(
        max_num_seqs=32, max_num_batched_tokens=32, tokens=(3, 30, 32), rows=(3, 32)
    )


def test_very_many_sizes_are_rounded_up_and_stay_within_the_limit():
    limit = 3 * MAX_SIZES + 1
    found = suggest_ladder(dict.fromkeys(range(1, limit + 1), 1), limit, 4)
    assert len(found) == 4
    assert found[-1] == limit
    exact = [round(limit * part) for part in (0.25, 0.5, 0.75)]
    assert all(abs(a - b) <= 4 for a, b in zip(found, exact, strict=False))


@pytest.mark.parametrize(
    ("sizes", "num_rungs", "words"),
    [({0: 1}, 2, r"size 0 lies outside \[1, 12\]"), ({13: 1}, 2, "size 13"), ({}, 0, "at least 1")],
)
def test_what_cannot_be_is_refused(sizes, num_rungs, words):
    with pytest.raises(ValueError, match=words):
        suggest_ladder(sizes, LIMIT, num_rungs)


def test_padding_share():
    assert padding_share({3: 2, 8: 1}, (4, 8)) == pytest.approx(2 / 16)
    assert padding_share({}, (4, 8)) == 0.0
