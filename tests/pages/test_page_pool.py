"""Pool, table and manager: nothing lost, nothing owned twice, under random use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.pages.kv_manager import KVManager
from jaxserve.pages.page_pool import NULL_PAGE, PagePool
from jaxserve.pages.page_table import PageTable


def test_alloc_takes_all_or_nothing():
    pool = PagePool(4)
    assert pool.alloc(4) is None
    assert pool.num_free == 3
    taken = pool.alloc(3)
    assert sorted(taken) == [1, 2, 3]
    assert NULL_PAGE not in taken
    assert pool.alloc(1) is None
    assert pool.alloc(0) == []


def test_shared_page_is_free_only_after_its_last_owner():
    pool = PagePool(3)
    (page,) = pool.alloc(1)
    pool.share([page])
    pool.release([page])
    assert pool.num_free == 1
    assert pool.ref_count(page) == 1
    pool.release([page])
    assert pool.num_free == 2


@pytest.mark.parametrize("use", ["release", "share"])
def test_a_page_without_owner_is_refused(use):
    pool = PagePool(3)
    with pytest.raises(ValueError, match="page 2 has no owner"):
        getattr(pool, use)([2])


def test_a_leak_is_found():
    kv = KVManager(num_pages=5, page_size=4, max_model_len=16)
    table = kv.new_table()
    assert kv.grow(table, 9, write_from=0)
    table.clear()  # pages dropped without going back to the pool
    with pytest.raises(AssertionError, match="ref_count 1, owners 0"):
        kv.check_invariants([])


def test_a_page_twice_in_the_free_list_is_found():
    pool = PagePool(3)
    pool._free.append(1)
    with pytest.raises(AssertionError, match="twice"):
        pool.check_invariants()


def test_a_table_grows_up_to_its_limit():
    table = PageTable(max_pages=20, page_size=8)
    table.append([7, 3])
    assert table.row.tolist() == [7, 3]
    assert table.num_slots == 16
    assert [table.num_missing(n) for n in (0, 16, 17, 32)] == [0, 0, 1, 2]
    table.append(list(range(8, 26)))
    assert len(table) == 20
    assert table.page_ids == [7, 3, *range(8, 26)]
    with pytest.raises(ValueError, match="21 pages pass the row's limit of 20"):
        table.append([1])
    assert table.clear() == [7, 3, *range(8, 26)]
    assert table.row.tolist() == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=60))
def test_random_growth_and_freeing_keeps_every_page(operations):
    kv = KVManager(num_pages=12, page_size=4, max_model_len=40, enable_prefix_caching=False)
    tables = [kv.new_table() for _ in range(4)]
    for which, num_tokens in operations:
        table = tables[which]
        if num_tokens % 5 == 0:
            kv.free(table)
            assert len(table) == 0
        else:
            missing, free = table.num_missing(num_tokens), kv.pool.num_free
            grown = kv.grow(table, num_tokens, write_from=0)
            assert grown == (missing <= free)
            assert kv.pool.num_free == free - missing * grown
        kv.check_invariants(tables)
    for table in tables:
        kv.free(table)
    assert kv.pool.num_free == kv.pool.num_usable
