"""The KV manager over pages whose content is known: whatever is shared, copied, evicted, swapped or
given up, every table reads back its own tokens.

More examples: raise `max_examples` at the end of this file.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.pages.eviction import EVICTIONS
from jaxserve.pages.kv_manager import KVManager, PrefixMatch
from tests.pages.kv_memory import Fragment, Memory

PAGE = 4


def memory(num_pages: int = 16, num_host_pages: int = 0, **options) -> Memory:
    options = {"page_size": PAGE, "max_model_len": 64} | options
    return Memory(KVManager(num_pages=num_pages, num_host_pages=num_host_pages, **options))


def run(one: Memory, tokens: list[int], **options) -> Fragment:
    """Computes all of some tokens in one step."""
    fragment = one.start(tokens, **options)
    assert fragment is not None
    one.step()
    one.check()
    return fragment


def tokens_of(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


# Prefix hits


@pytest.mark.parametrize(
    ("length", "num_hit"), [(1, 0), (3, 0), (4, 3), (5, 4), (7, 4), (8, 7), (9, 8)]
)
def test_a_second_prompt_finds_all_full_pages_but_computes_its_last_token(length, num_hit):
    one = memory()
    run(one, tokens_of(length))
    assert one.kv.peek(None, tokens_of(length)) == num_hit
    second = one.start(tokens_of(length))
    assert second.num_computed == num_hit
    copies = one.step().copies
    assert len(copies) == (1 if length % PAGE == 0 else 0)
    one.check()


def test_a_full_hit_copies_one_page_and_is_back_on_the_trees_page_after_the_step():
    one = memory()
    first = run(one, tokens_of(12))
    second = one.start(tokens_of(12))
    assert second.table[2] != first.table[2]
    num_free = one.kv.pool.num_free
    moves = one.step()
    assert moves.copies == ((first.table[2], moves.copies[0][1]),)
    assert second.table.page_ids == first.table.page_ids
    assert second.table.num_tree_pages == 3
    assert one.kv.pool.num_free == num_free + 1  # the copy was a duplicate
    one.check()


def test_a_full_hit_whose_last_page_is_evicted_meanwhile_puts_its_copy_in_the_tree():
    one = memory(num_pages=6)
    first = run(one, tokens_of(12))
    one.free(first)
    second = one.start(tokens_of(12))
    (source,) = one.kv._read_by_copies
    other = one.start(tokens_of(4, first=50))
    assert other is not None
    assert one.kv.num_available_pages == 1  # the source of the copy: cached, not lent before it
    assert one.start(tokens_of(4, first=90)) is None
    assert source not in one.cached_pages()  # looking for room, it was evicted
    copy = second.table[2]
    one.step()
    assert second.table[2] == copy
    one.check()


def test_without_the_last_page_a_hit_needs_no_copy():
    one = memory(num_pages=4)
    one.free(run(one, tokens_of(12)))
    assert one.start(tokens_of(12)) is None  # three pages and a copy
    second = one.start(tokens_of(12), copy_last_page=False)
    assert second.num_computed == 8
    assert one.step().copies == ()
    one.check()
    assert one.kv.peek(None, tokens_of(12)) == 11


@pytest.mark.parametrize("length", [5, 9, 11])
def test_leaving_out_the_last_page_changes_nothing_where_it_is_not_full(length):
    one = memory()
    run(one, tokens_of(length))
    for copy_last_page in (True, False):
        match = one.kv.match(None, tokens_of(length), copy_last_page)
        assert match.num_tokens == length // PAGE * PAGE


def test_namespaces_share_nothing():
    one = memory()
    run(one, tokens_of(8), namespace="a")
    second = run(one, tokens_of(8), namespace="b")
    assert one.num_owned_now() == 4
    assert one.kv.peek("c", tokens_of(8)) == 0
    one.free(second)
    assert one.kv.peek("b", tokens_of(8)) == 7


def test_two_that_compute_the_same_at_once_end_on_one_set_of_pages():
    one = memory()
    first, second = one.start(tokens_of(9)), one.start(tokens_of(9))
    assert one.num_owned_now() == 6
    one.step()
    assert first.table.page_ids[:2] == second.table.page_ids[:2]
    assert one.num_owned_now() == 4
    one.check()


def test_without_a_tree_nothing_is_found_and_everything_is_freed():
    one = memory(enable_prefix_caching=False)
    first = run(one, tokens_of(12))
    assert one.kv.match(None, tokens_of(12)) == PrefixMatch()
    assert one.kv.peek(None, tokens_of(12)) == 0
    child = one.fork(first, 10, [7])
    assert one.plan(child)
    assert len(one.step().copies) == 1
    one.check()
    one.free(first)
    one.free(child)
    assert one.kv.pool.num_free == one.kv.pool.num_usable
    assert one.kv.clear_cache() == 0


# Forks and copy-on-write


@pytest.mark.parametrize("has_tree", [True, False])
@pytest.mark.parametrize("num_parent", [4, 6, 8, 11])
@pytest.mark.parametrize("num_tokens", range(1, 12))
def test_a_fork_at_any_boundary_shares_what_it_can_and_copies_one_page_at_most(
    num_tokens, num_parent, has_tree
):
    if num_tokens > num_parent:
        return
    one = memory(enable_prefix_caching=has_tree)
    parent = run(one, tokens_of(num_parent))
    child = one.fork(parent, num_tokens, [50, 51, 52, 53, 54])
    num_pages = -(-num_tokens // PAGE)
    assert child.table.page_ids == parent.table.page_ids[:num_pages]
    one.check()
    assert one.plan(child)
    assert len(one.step().copies) == (1 if num_tokens % PAGE else 0)
    one.check()
    parent.tokens += [90, 91, 92, 93, 94]
    assert one.plan(parent)
    assert one.step().copies == ()  # what the child left is the parent's alone
    one.check()


def test_a_fork_without_new_tokens_computes_the_last_one_again():
    one = memory()
    parent = run(one, tokens_of(8))
    child = one.fork(parent, 8, [])
    assert child.num_computed == 7
    one.plan(child)
    assert len(one.step().copies) == 1
    assert child.table.page_ids == parent.table.page_ids
    one.check()


def test_of_several_owners_of_a_partial_page_the_last_one_to_write_needs_no_copy():
    one = memory()
    parent = run(one, tokens_of(6))
    children = [one.fork(parent, 6, [50 + i]) for i in range(3)]
    parent.tokens.append(99)
    shared = parent.table[1]
    everyone = [children[1], parent, children[0], children[2]]
    for fragment in everyone:
        assert one.plan(fragment)
    copies = one.step().copies
    assert [source for source, _ in copies] == [shared] * 3
    assert [f.table[1] == shared for f in everyone] == [False, False, False, True]
    one.check()


def test_an_owner_that_gave_up_its_share_in_the_same_step_leaves_the_page_to_the_other():
    one = memory()
    parent = run(one, tokens_of(6))
    child = one.fork(parent, 6, [50])
    one.free(parent)
    assert one.kv.num_needed(child.table, 7, 6) == 0
    one.plan(child)
    assert one.step().copies == ()
    one.check()


def test_a_page_that_a_copy_reads_is_not_lent_before_the_copy_is_made():
    one = memory(num_pages=4, enable_prefix_caching=False)
    parent = run(one, tokens_of(3))
    child = one.fork(parent, 3, [50])
    one.plan(child)
    source = parent.table[0]
    one.free(parent)  # only the copy needs the page now
    other = one.start(tokens_of(4, first=70))
    assert source not in (*child.table.page_ids, *other.table.page_ids)
    assert one.start(tokens_of(4, first=80)) is None
    one.step()
    one.check()
    assert one.start(tokens_of(4, first=80)).table.page_ids == [source]


def test_a_retreat_inside_the_trees_pages_leaves_them_alone():
    one = memory()
    parent = run(one, tokens_of(12))
    before = parent.table.page_ids
    child = one.fork(parent, 6, [50, 51, 52])
    assert child.table.num_tree_pages == 2
    one.plan(child)
    one.step()
    assert child.table.num_tree_pages == 2  # its own second page is in the tree by now
    assert parent.table.page_ids == before
    assert child.table[1] != before[1]
    one.check()
    one.free(parent)
    one.check()
    assert one.kv.peek(None, tokens_of(12)) == 11


def test_growing_takes_nothing_when_there_is_too_little():
    one = memory(num_pages=5)
    parent = run(one, tokens_of(6))
    child = one.fork(parent, 6, tokens_of(9, first=50))
    free, node = one.kv.pool.num_free, child.table.node
    assert not one.plan(child)  # two pages and a copy
    assert (one.kv.pool.num_free, child.table.node) == (free, node)
    assert one.kv.take_moves() == ((), (), ())
    one.check()
    assert one.plan(child, 6)
    one.step()
    one.check()


# Eviction


def test_cached_pages_make_room_and_owned_ones_never_do():
    one = memory(num_pages=6)
    one.free(run(one, tokens_of(12)))
    held = run(one, tokens_of(5, first=30))
    assert one.kv.num_available_pages == 3
    assert one.kv.num_cached_pages == 3
    assert one.start(tokens_of(16, first=60)) is None
    assert one.kv.num_cached_pages == 3  # a refusal evicts nothing
    third = run(one, tokens_of(12, first=60))
    assert one.kv.num_owned_pages == 5
    one.free(held)
    one.free(third)
    assert one.kv.num_owned_pages == 0
    one.check()


def test_clearing_the_cache_needs_that_nobody_uses_it():
    one = memory()
    fragment = run(one, tokens_of(9))
    with pytest.raises(RuntimeError, match="2 of 2 pages are in use"):
        one.kv.clear_cache()
    one.free(fragment)
    assert one.kv.clear_cache() == 2
    assert one.kv.pool.num_free == one.kv.pool.num_usable
    one.check()


def test_reset_forgets_everything():
    one = memory(num_host_pages=3)
    fragment = run(one, tokens_of(9))
    child = one.fork(fragment, 9, [1])
    one.plan(child)
    one.swap_out(fragment)
    one.kv.reset()
    one.kv.check_invariants([])
    assert one.kv.pool.num_free == one.kv.pool.num_usable
    assert one.kv.host.num_free == 3
    assert one.kv.take_moves() == ((), (), ())
    assert one.kv.peek(None, tokens_of(9)) == 0


# Swapping


@pytest.mark.parametrize("has_tree", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 10])
def test_what_is_swapped_out_comes_back_though_its_pages_were_used_meanwhile(num_tokens, has_tree):
    one = memory(num_pages=4, num_host_pages=3, enable_prefix_caching=has_tree)
    fragment = run(one, tokens_of(num_tokens))
    assert one.swap_out(fragment)
    other = one.start(tokens_of(12, first=50))
    moves = one.step()
    one.check()
    num_pages = -(-num_tokens // PAGE)
    assert len(moves.moves_out) == num_pages
    assert one.kv.host.num_free == 3 - num_pages
    one.free(other)
    fragment.tokens.append(99)
    assert one.admit(fragment)
    assert one.kv.host.num_free == 3 - num_pages  # read by the moves: not lent before them
    assert len(one.step().moves_in) == num_pages
    assert one.kv.host.num_free == 3
    one.check()


def test_what_the_tree_still_has_is_not_moved_back():
    one = memory(num_pages=6, num_host_pages=4)
    fragment = run(one, tokens_of(14))
    one.swap_out(fragment)
    one.step()
    one.free(run(one, tokens_of(13, first=50)))  # evicts two of the three pages in the tree
    assert one.kv.tree.peek(None, fragment.tokens) == 1
    fragment.tokens.append(99)
    assert one.admit(fragment)
    assert len(one.step().moves_in) == 3
    one.check()


def test_a_swapped_one_may_find_more_in_the_tree_than_it_had():
    one = memory(num_host_pages=4)
    fragment = one.start(tokens_of(12), 6)
    one.step()
    one.swap_out(fragment)
    run(one, tokens_of(12))
    assert one.admit(fragment)
    assert fragment.num_computed == 11
    moves = one.step()
    assert (moves.moves_in, len(moves.copies)) == ((), 1)
    assert one.kv.host.num_free == 4
    one.check()


def test_a_full_host_tier_changes_nothing():
    one = memory(num_host_pages=2)
    fragment = run(one, tokens_of(9))
    assert not one.swap_out(fragment)
    assert one.kv.host.num_free == 2
    assert one.kv.take_moves() == ((), (), ())
    one.check()


def test_host_pages_given_up_before_they_were_written_are_not_written_twice():
    one = memory(num_host_pages=2)
    first, second = run(one, tokens_of(8)), run(one, tokens_of(8, first=50))
    one.swap_out(first)
    one.free(first)
    one.swap_out(second)
    assert len(one.step().moves_out) == 2
    one.check()


# Everything at once


class Machine(RuleBasedStateMachine):
    """Steps of random plans over a small pool. Within a step tables grow, newcomers are admitted and
    others, which are not part of it, are freed or swapped out; forks are made between two steps.
    """

    @initialize(
        page_size=st.integers(2, 4),
        num_pages=st.integers(3, 12),
        num_host_pages=st.integers(0, 5),
        eviction=st.sampled_from(sorted(EVICTIONS)),
        has_tree=st.sampled_from([True, True, True, False]),
    )
    def start_empty(self, page_size, num_pages, num_host_pages, eviction, has_tree):
        self.memory = Memory(
            KVManager(
                num_pages=num_pages,
                page_size=page_size,
                max_model_len=200,
                eviction=eviction,
                enable_prefix_caching=has_tree,
                num_host_pages=num_host_pages,
            )
        )

    def those(self, condition) -> list[Fragment]:
        return [one for one in self.memory.fragments if condition(one)]

    def idle(self) -> list[Fragment]:
        """Those with device pages that are not part of the step under way."""
        return self.those(lambda one: not one.num_planned and one.host_pages is None)

    @property
    def is_planning(self) -> bool:
        kv = self.memory.kv
        planned = any(one.num_planned for one in self.memory.fragments)
        return planned or bool(kv._copies or kv._moves_in or kv._moves_out)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        share=st.floats(0, 1),
        namespace=st.sampled_from(["a", "b"]),
        copy_last_page=st.booleans(),
    )
    def admit(self, tokens, share, namespace, copy_last_page):
        probe = Fragment(tokens, self.memory.kv.new_table(), namespace)
        known = self.memory.kv.match(namespace, tokens, copy_last_page).num_tokens
        num_tokens = 1 + int(share * (len(tokens) - known - 1))
        self.memory.admit(probe, num_tokens, copy_last_page)

    @rule(pick=st.integers(0, 99), more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, pick, more):
        if found := self.idle():
            one = found[pick % len(found)]
            if not one.num_left:
                one.tokens += more
            self.memory.plan(one, 1 + pick % one.num_left)

    @precondition(lambda self: not self.is_planning)
    @rule(
        pick=st.integers(0, 99),
        keep=st.integers(0, 99),
        more=st.lists(st.integers(0, 1), max_size=5),
    )
    def fork(self, pick, keep, more):
        if found := [one for one in self.idle() if one.num_computed]:
            parent = found[pick % len(found)]
            num_tokens = 1 + keep % parent.num_computed
            if num_tokens + len(more) > 1:
                self.memory.fork(parent, num_tokens, more)

    @rule(pick=st.integers(0, 99))
    def free(self, pick):
        if found := self.those(lambda one: not one.num_planned):
            self.memory.free(found[pick % len(found)])

    @rule(pick=st.integers(0, 99))
    def swap_out(self, pick):
        if found := self.idle():
            self.memory.swap_out(found[pick % len(found)])

    @rule(pick=st.integers(0, 99))
    def swap_in(self, pick):
        if found := self.those(lambda one: one.host_pages is not None):
            one = found[pick % len(found)]
            if len(one.tokens) == one.host_pages.num_tokens:
                one.tokens.append(pick % 2)
            self.memory.admit(one, 1)

    @rule()
    def step(self):
        self.memory.step()

    @precondition(lambda self: not self.is_planning and not self.memory.num_owned_now())
    @rule()
    def clear(self):
        self.memory.kv.clear_cache()
        assert self.memory.kv.pool.num_free == self.memory.kv.pool.num_usable

    @precondition(lambda self: hasattr(self, "memory") and not self.is_planning)
    @rule()
    def evict_all(self):
        kv = self.memory.kv
        num_free, num_cached = kv.pool.num_free, kv.num_cached_pages
        assert kv.evict_all() == num_cached
        assert kv.num_cached_pages == 0
        assert kv.pool.num_free == num_free + num_cached

    @invariant()
    def every_page_is_accounted_for(self):
        if not hasattr(self, "memory"):
            return
        kv = self.memory.kv
        kv.pool.check_invariants()
        kv.host.check_invariants()
        if kv.tree is not None:
            kv.tree.check_invariants()
        if not self.is_planning:
            self.memory.check()
            assert kv.num_owned_pages == self.memory.num_owned_now()

    def teardown(self):
        if hasattr(self, "memory"):
            self.memory.step()
            for one in list(self.memory.fragments):
                self.memory.free(one)
            self.memory.kv.clear_cache()
            assert self.memory.kv.pool.num_free == self.memory.kv.pool.num_usable
            assert self.memory.kv.host.num_free == self.memory.kv.host.num_pages


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
