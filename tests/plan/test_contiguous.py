"""The allocators that paging replaced: runs never overlap, nothing is lost, reservations are as said."""

import numpy as np
import pytest

from jaxserve.plan.simulate.contiguous import (
    BuddyRuns,
    FixedRuns,
    contiguous_max,
    contiguous_pow2,
)


def test_fixed_runs_are_all_of_one_length():
    runs = FixedRuns(10, 4)
    one, two = runs.alloc(1), runs.alloc(4)
    assert (one, two) == (range(1, 5), range(5, 9))
    assert runs.alloc(1) is None
    assert runs.num_lent == 8
    runs.check_invariants()
    runs.release(one)
    assert runs.alloc(2) == one
    with pytest.raises(ValueError, match="5 pages pass the run's 4"):
        runs.alloc(5)


def test_a_buddy_run_is_halved_until_it_fits_and_joins_again():
    runs = BuddyRuns(8)
    one = runs.alloc(3)
    assert one == range(1, 5)
    two = runs.alloc(1)
    assert two == range(5, 6)
    assert runs.alloc(4) is None  # 3 pages are free, none of them side by side in a run of 4
    three = runs.alloc(2)
    assert three == range(7, 9)
    for run in (three, two, one):
        runs.release(run)
        runs.check_invariants()
    assert runs.alloc(8) == range(1, 9)


def test_a_pool_that_is_no_power_of_two_is_used_in_full():
    runs = BuddyRuns(13)
    assert [len(runs.alloc(n)) for n in (8, 4, 1)] == [8, 4, 1]
    assert runs.alloc(1) is None
    runs.check_invariants()


@pytest.mark.parametrize("make", [lambda: BuddyRuns(100), lambda: FixedRuns(100, 7)])
def test_random_use_never_overlaps_and_loses_nothing(make):
    rng = np.random.default_rng(3)
    runs = make()
    lent: list[range] = []
    refused = 0
    for _ in range(2000):
        if lent and rng.random() < 0.45:
            runs.release(lent.pop(rng.integers(len(lent))))
        else:
            run = runs.alloc(int(rng.integers(1, 8)))
            refused += run is None
            lent += [] if run is None else [run]
        pages = [page for run in lent for page in run]
        assert len(set(pages)) == len(pages) == runs.num_lent
        assert all(1 <= page <= 100 for page in pages)
        runs.check_invariants()
    assert refused
    for run in lent:
        runs.release(run)
    runs.check_invariants()
    assert runs.num_lent == 0


@pytest.mark.parametrize("runs", [BuddyRuns(8), FixedRuns(8, 4)])
def test_a_run_released_twice_is_found(runs):
    run = runs.alloc(4)
    runs.alloc(4)
    runs.release(run)
    with pytest.raises(ValueError, match="free already"):
        runs.release(run)


@pytest.mark.parametrize(
    ("make", "num_tokens", "num_reserved"),
    [
        (contiguous_max, 5, 96),
        (contiguous_max, 96, 96),
        (contiguous_pow2, 5, 16),  # 8 slots, but a whole page
        (contiguous_pow2, 33, 64),
        (contiguous_pow2, 64, 64),
        (contiguous_pow2, 96, 128),
    ],
)
def test_a_table_reserves_its_run_at_once(make, num_tokens, num_reserved):
    kv = make(num_pages=33, page_size=16, max_model_len=96)
    table = kv.reserved_table(num_tokens)
    assert kv.num_needed(table, 1, 0) == 0
    assert kv.grow(table, 1, 0)
    assert table.num_slots == num_reserved
    assert kv.num_owned_pages * 16 == num_reserved
    assert kv.grow(table, num_tokens, 1)
    assert table.num_slots == num_reserved
    with pytest.raises(ValueError, match="pass the reservation"):
        kv.grow(table, num_reserved + 1, 1)
    kv.free(table)
    assert (len(table), kv.num_owned_pages) == (0, 0)


@pytest.mark.parametrize("make", [contiguous_max, contiguous_pow2])
def test_without_a_run_nobody_is_admitted(make):
    kv = make(num_pages=9, page_size=16, max_model_len=128)
    table, late = kv.reserved_table(128), kv.reserved_table(10)
    assert kv.grow(table, 128, 0)
    assert kv.num_needed(late, 1, 0) > kv.num_available_pages
    assert not kv.grow(late, 1, 0)
    kv.free(table)
    assert kv.grow(late, 1, 0)
