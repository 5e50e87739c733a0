"""The map of the page pool says of each page what the KV manager counts, whatever was done to it."""

from collections import Counter

from jaxserve.pages.kv_manager import KVManager
from jaxserve.pages.page_map import PageState, map_pages


def make_kv(**options) -> KVManager:
    return KVManager(**{"num_pages": 12, "page_size": 4, "max_model_len": 32} | options)


def counts(kv: KVManager) -> Counter:
    return Counter(map_pages(kv).states)


def test_an_empty_pool_is_free_but_for_the_null_page():
    assert list(map_pages(make_kv()).states) == [PageState.NULL] + 11 * [PageState.FREE]


def test_pages_are_owned_shared_cached_and_free_again():
    kv = make_kv()
    tokens = list(range(10))
    table = kv.new_table()
    kv.adopt(table, kv.match("a", tokens))
    assert kv.grow(table, 10, 0)
    assert counts(kv)[PageState.OWNED] == 3
    kv.record(table, tokens, 10)  # two full pages are the tree's too; that makes nobody share them
    assert counts(kv)[PageState.OWNED] == 3

    child = kv.fork(table, 10)
    assert [map_pages(kv).states[page] for page in table.page_ids] == 3 * [PageState.SHARED]
    kv.free(child)
    assert [map_pages(kv).states[page] for page in table.page_ids] == 3 * [PageState.OWNED]

    pages = table.page_ids
    kv.free(table)
    states = map_pages(kv).states
    assert [states[page] for page in pages] == 2 * [PageState.CACHED] + [PageState.FREE]
    found = counts(kv)
    assert found[PageState.CACHED] == kv.num_cached_pages == 2
    assert found[PageState.FREE] == kv.pool.num_free


def test_a_pool_without_a_tree_has_no_cached_page():
    kv = make_kv(enable_prefix_caching=False)
    table = kv.new_table()
    assert kv.grow(table, 5, 0)
    assert counts(kv) == {PageState.NULL: 1, PageState.OWNED: 2, PageState.FREE: 9}
    kv.free(table)
    assert counts(kv)[PageState.CACHED] == 0


def test_pages_of_the_host_tier():
    kv = make_kv(num_host_pages=5)
    assert map_pages(kv).host_pages == bytes(5)
    table = kv.new_table()
    assert kv.grow(table, 8, 0)
    assert kv.swap_out(table, 8) is not None
    assert sum(map_pages(kv).host_pages) == 2
    assert map_pages(make_kv()).host_pages == b""
