"""The radix tree against a page-by-page model: what is known, who holds it, what goes first."""

import random
from array import array
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.pages.eviction import EVICTIONS
from jaxserve.pages.radix_node import RadixNode, token_bytes
from jaxserve.pages.radix_tree import RadixTree

NAMESPACES = ("base", ("base", "salt"), None)
# Pages that differ in one token only, and few of them, so that prefixes meet all the time; the
# bytes of the tokens look alike when read out of step.
LAST_TOKENS = st.lists(st.sampled_from([0, 1, 256]), max_size=5)
PRIORITIES = st.integers(-1, 2)
FORMATS = {
    "list": list,
    "array": lambda ids: array("i", ids),
    "int32": lambda ids: np.array(ids, np.int32),
    "int64": lambda ids: np.array(ids, np.int64),
    "bytes": lambda ids: np.array(ids, np.int32).tobytes(),
}

Prefix = tuple[object, tuple[int, ...]]  # namespace, the tokens from the beginning to a page's end


@dataclass
class Page:
    """A page of the model, with what the policies look at."""

    page_id: int
    last_used: int = 0
    hits: int = 0
    created: int = 0
    priority: int = 0


MODEL_KEYS = {
    "lru": lambda page: page.last_used,
    "lfu": lambda page: (page.hits, page.last_used),
    "fifo": lambda page: page.created,
    "priority": lambda page: (-page.priority, page.last_used),
}


class Fold:
    """A listener that knows only what it is told: the prefixes that are in the tree."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.prefixes: set[Prefix] = set()

    def _last_pages(self, namespace, token_ids: bytes, num_pages: int) -> set[Prefix]:
        assert num_pages > 0, "an event about nothing"
        tokens = tuple(np.frombuffer(token_ids, np.int32).tolist())
        assert len(tokens) % self.page_size == 0
        ends = [len(tokens) - i * self.page_size for i in range(num_pages)]
        return {(namespace, tokens[:end]) for end in ends}

    def inserted(self, namespace, token_ids: bytes, num_pages: int) -> None:
        new = self._last_pages(namespace, token_ids, num_pages)
        assert not new & self.prefixes, "told twice of a page that came"
        self.prefixes |= new

    def evicted(self, namespace, token_ids: bytes, num_pages: int) -> None:
        gone = self._last_pages(namespace, token_ids, num_pages)
        assert gone <= self.prefixes, "told of a page that was not there"
        self.prefixes -= gone


class Checked:
    """A tree and a model with one entry for each prefix; every operation is done on both.

    Args:
        page_size: tokens a page.
        eviction: a name in `EVICTIONS`.
    """

    def __init__(self, page_size: int, eviction: str):
        self.page_size = page_size
        self.key = MODEL_KEYS[eviction]
        self.fold = Fold(page_size)
        self.tree = RadixTree(page_size, eviction, self.fold)
        self.pages: dict[Prefix, Page] = {}
        self.holders: list[tuple[Prefix, RadixNode]] = []
        self.clock = 0
        self.next_page_id = 1

    def tokens(self, last_tokens: list[int]) -> list[int]:
        """A page for each of the last tokens, and one token that fills no page if pages have more."""
        start = [0] * (self.page_size - 1)
        return [token for last in last_tokens for token in (*start, last)] + start[:1]

    # What the model knows.

    def prefixes_of(self, namespace, tokens) -> list[Prefix]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def num_known(self, namespace, tokens) -> int:
        """Brute force: the longest of all prefixes in the model that `tokens` begin with."""
        lengths = [
            len(known) // self.page_size
            for space, known in self.pages
            if space == namespace and tuple(tokens[: len(known)]) == known
        ]
        return max(lengths, default=0)

    def num_locks(self, prefix: Prefix) -> int:
        namespace, tokens = prefix
        return sum(
            space == namespace and held[: len(tokens)] == tokens
            for (space, held), _ in self.holders
        )

    def is_leaf(self, prefix: Prefix) -> bool:
        namespace, tokens = prefix
        longer = (known for space, known in self.pages if space == namespace)
        return not any(len(t) > len(tokens) and t[: len(tokens)] == tokens for t in longer)

    # What the model does.

    def model_match(self, namespace, tokens) -> list[int]:
        self.clock += 1
        path = self.prefixes_of(namespace, tokens)[: self.num_known(namespace, tokens)]
        for prefix in path:
            self.pages[prefix].last_used = self.clock
            self.pages[prefix].hits += 1
        return [self.pages[prefix].page_id for prefix in path]

    def model_extend(self, namespace, tokens, page_ids, priority) -> list[int]:
        """`tokens` from the beginning, `page_ids` for its last pages; the caller's lock is among
        the holders already.
        """
        self.clock += 1
        path = self.prefixes_of(namespace, tokens)
        num_old = self.num_known(namespace, tokens)
        for prefix in path[:num_old]:
            page = self.pages[prefix]
            page.last_used, page.priority = self.clock, min(page.priority, priority)
        before = Page(0, created=self.clock, priority=priority)
        if num_old and num_old < len(path):
            last = self.pages[path[num_old - 1]]
            grows = self.is_leaf(path[num_old - 1]) and self.num_locks(path[num_old - 1]) == 1
            if grows and last.priority == priority:
                before = last  # pages of one node share their age and hits
        first_given = len(path) - len(page_ids)
        for i in range(num_old, len(path)):
            page_id = page_ids[i - first_given]
            self.pages[path[i]] = Page(page_id, self.clock, before.hits, before.created, priority)
        return [self.pages[prefix].page_id for prefix in path[first_given:]]

    def model_evict(self, num_pages: int) -> list[int]:
        gone = []
        for _ in range(num_pages):
            free = [p for p in self.pages if self.is_leaf(p) and not self.num_locks(p)]
            if not free:
                break
            gone.append(self.pages.pop(min(free, key=lambda p: self.key(self.pages[p]))).page_id)
        return gone

    # Both.

    def extend(self, index: int, tokens, priority: int, form: str = "array") -> None:
        """Extends the holder at `index` by `tokens` and moves it."""
        (namespace, before), node = self.holders[index]
        num_pages = len(tokens) // self.page_size
        page_ids = list(range(self.next_page_id, self.next_page_id + num_pages))
        self.next_page_id += num_pages
        found, end = self.tree.extend(node, FORMATS[form](tokens), page_ids, priority)
        whole = before + tuple(tokens[: num_pages * self.page_size])
        self.holders[index] = ((namespace, whole), end)
        assert found == self.model_extend(namespace, whole, page_ids, priority)

    def run(self, namespace, tokens, cut: int, priority: int, form: str = "array") -> None:
        """A request: a match of the first `cut` tokens, a lock, and what it computes after."""
        match = self.tree.match(namespace, FORMATS[form](tokens[:cut]))
        self.tree.lock(match.node)
        self.tree.count_hit(match.node)
        assert match.page_ids == self.model_match(namespace, tokens[:cut])
        num_matched = len(match.page_ids) * self.page_size
        self.holders.append(((namespace, tuple(tokens[:num_matched])), match.node))
        self.extend(len(self.holders) - 1, tokens[num_matched:], priority, form)

    def fork(self, index: int, num_pages: int) -> None:
        (namespace, tokens), node = self.holders[index]
        above = self.tree.ancestor(node, num_pages)
        self.tree.lock(above)
        self.holders.append(((namespace, tokens[: num_pages * self.page_size]), above))

    def finish(self, index: int) -> None:
        self.tree.unlock(self.holders.pop(index)[1])

    def evict(self, num_pages: int) -> None:
        assert sorted(self.tree.evict(num_pages)) == sorted(self.model_evict(num_pages))

    def peek(self, namespace, tokens) -> None:
        assert self.tree.peek(namespace, tokens) == self.num_known(namespace, tokens)

    def clear(self) -> None:
        if self.holders:
            with pytest.raises(RuntimeError, match="unlock them before clear"):
                self.tree.clear()
        else:
            expected = sorted(page.page_id for page in self.pages.values())
            assert sorted(self.tree.clear()) == expected
            assert self.tree.num_namespaces == 0
            self.pages.clear()

    def check(self) -> None:
        self.tree.check_invariants()
        assert self.tree.num_pages == len(self.pages)
        assert self.tree.num_unlocked == sum(not self.num_locks(p) for p in self.pages)
        assert self.fold.prefixes == set(self.pages)
        for (namespace, tokens), node in self.holders:
            path = self.prefixes_of(namespace, tokens)
            assert node.namespace == namespace
            assert node.num_prefix_pages == len(path)
            assert node.prefix_tokens() == token_bytes(tokens)
            assert node.prefix_page_ids() == [self.pages[p].page_id for p in path]


class TreeMachine(RuleBasedStateMachine):
    """Short histories, chosen and shortened by hypothesis."""

    @initialize(page_size=st.integers(1, 4), eviction=st.sampled_from(sorted(EVICTIONS)))
    def start(self, page_size, eviction):
        self.both = Checked(page_size, eviction)

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        last_tokens=LAST_TOKENS,
        num_matched=st.integers(0, 5),
        priority=PRIORITIES,
        form=st.sampled_from(sorted(FORMATS)),
    )
    def run_new(self, namespace, last_tokens, num_matched, priority, form):
        tokens = self.both.tokens(last_tokens)
        self.both.run(namespace, tokens, num_matched * self.both.page_size, priority, form)

    @precondition(lambda self: self.both.holders)
    @rule(data=st.data(), last_tokens=LAST_TOKENS, priority=PRIORITIES)
    def run_on(self, data, last_tokens, priority):
        index = data.draw(st.integers(0, len(self.both.holders) - 1))
        self.both.extend(index, self.both.tokens(last_tokens), priority)

    @precondition(lambda self: self.both.holders)
    @rule(data=st.data())
    def fork(self, data):
        index = data.draw(st.integers(0, len(self.both.holders) - 1))
        most = self.both.holders[index][1].num_prefix_pages
        self.both.fork(index, data.draw(st.integers(0, most)))

    @precondition(lambda self: self.both.holders)
    @rule(data=st.data())
    def finish(self, data):
        self.both.finish(data.draw(st.integers(0, len(self.both.holders) - 1)))

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages):
        self.both.evict(num_pages)

    @rule(namespace=st.sampled_from(NAMESPACES), last_tokens=LAST_TOKENS)
    def peek(self, namespace, last_tokens):
        self.both.peek(namespace, self.both.tokens(last_tokens))

    @rule()
    def clear(self):
        self.both.clear()

    @invariant()
    def check(self):
        self.both.check()


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("eviction", sorted(EVICTIONS))
def test_long_histories(eviction, page_size):
    """Full trees, in which most leaves were used again since they could first go."""
    both = Checked(page_size, eviction)
    rng = random.Random(f"{eviction} {page_size}")

    def new_tokens() -> list[int]:
        return both.tokens(rng.choices([0, 1, 256], k=rng.randrange(5)))

    for _ in range(300):
        namespace, known = rng.choice([*both.pages, (rng.choice(NAMESPACES), ())])
        tokens = [*known, *new_tokens()]
        both.peek(namespace, tokens)
        both.run(namespace, tokens, rng.choice([0, len(known), len(tokens)]), rng.randint(-1, 2))
        if rng.random() < 0.3:
            both.extend(rng.randrange(len(both.holders)), new_tokens(), rng.randint(-1, 2))
        if rng.random() < 0.2:
            index = rng.randrange(len(both.holders))
            both.fork(index, rng.randint(0, both.holders[index][1].num_prefix_pages))
        while len(both.holders) > rng.randrange(8):
            both.finish(rng.randrange(len(both.holders)))
        both.check()
        while len(both.pages) > rng.randrange(20, 60) and both.tree.num_unlocked:
            both.evict(rng.randint(1, 4))
            both.check()


def insert(tree: RadixTree, tokens, first_page_id: int, *, namespace=None, priority=0) -> RadixNode:
    """Runs one request and leaves it locked; its pages get ids from `first_page_id` on."""
    match = tree.match(namespace, tokens)
    tree.lock(match.node)
    rest = tokens[len(match.page_ids) * tree.page_size :]
    page_ids = range(first_page_id, first_page_id + len(rest) // tree.page_size)
    return tree.extend(match.node, rest, page_ids, priority)[1]


def test_only_full_pages_are_kept_and_matched():
    tree = RadixTree(page_size=4)
    node = insert(tree, list(range(11)), 1)
    assert node.prefix_page_ids() == [1, 2]
    assert tree.match(None, list(range(11))).page_ids == [1, 2]
    assert tree.match(None, list(range(7))).page_ids == [1]
    assert tree.match(None, list(range(3))).page_ids == []


@pytest.mark.parametrize("num_pages", [1, 2, 3, 7, 8, 9, 64])
def test_a_match_stops_at_the_very_page_that_differs(num_pages):
    """Wherever one token of a long edge differs, and however much longer one of the two is."""
    page_size = 3
    tokens = list(range(page_size * num_pages))
    for position in range(len(tokens)):
        tree = RadixTree(page_size)
        insert(tree, tokens, 1)
        other = [*tokens[:position], -1, *tokens[position + 1 :], 5, 5, 5]
        assert tree.peek(None, other) == position // page_size
        match = tree.match(None, other)
        assert match.page_ids == list(range(1, 1 + position // page_size))
        assert match.node.num_prefix_pages == position // page_size
        tree.check_invariants()


def test_pages_that_differ_are_never_taken_for_each_other():
    """Tens of thousands of first pages under one root: each finds itself."""
    tree = RadixTree(page_size=2)
    rng = np.random.default_rng(0)
    pages = np.unique(rng.integers(-(2**31), 2**31, (20_000, 2), dtype=np.int32), axis=0)
    for i, page in enumerate(pages):
        tree.unlock(insert(tree, page, i))
    assert tree.num_pages == len(pages)
    assert [tree.match(None, page).page_ids for page in pages] == [[i] for i in range(len(pages))]


def test_namespaces_share_nothing():
    tree = RadixTree(page_size=2)
    insert(tree, [1, 2, 3, 4], 1, namespace="a")
    assert tree.match("b", [1, 2, 3, 4]).page_ids == []
    insert(tree, [1, 2, 3, 4], 3, namespace="b")
    assert tree.match("a", [1, 2, 3, 4]).page_ids == [1, 2]
    assert tree.match("b", [1, 2, 3, 4]).page_ids == [3, 4]


def test_what_is_in_the_tree_already_is_reported_as_duplicate():
    """Two requests compute the same pages side by side: the second gets the first one's."""
    tree = RadixTree(page_size=2)
    first, second = tree.match(None, []).node, tree.match(None, []).node
    tree.lock(first)
    tree.lock(second)
    assert tree.extend(first, [1, 2, 3, 4], [10, 11])[0] == [10, 11]
    found, node = tree.extend(second, [1, 2, 3, 4, 5, 6], [20, 21, 22])
    assert found == [10, 11, 22]
    assert node.prefix_page_ids() == [10, 11, 22]
    assert tree.num_pages == 3


def test_a_decoding_sequence_is_one_node():
    tree = RadixTree(page_size=2)
    node = insert(tree, [0, 0], 0)
    for i in range(1, 100):
        found, end = tree.extend(node, [i, i], [i])
        assert end is node
        assert found == [i]
    assert node.prefix_page_ids() == list(range(100))
    assert len(node.path()) == 2


@pytest.mark.parametrize("why", ["another holder", "a child", "less important"])
def test_a_node_that_others_depend_on_does_not_grow(why):
    tree = RadixTree(page_size=2)
    node = insert(tree, [1, 1], 1)
    if why == "another holder":
        tree.lock(node)
    elif why == "a child":
        tree.unlock(insert(tree, [1, 1, 2, 2], 2))
    _, end = tree.extend(node, [3, 3], [3], priority=int(why == "less important"))
    assert end is not node
    assert node.prefix_page_ids() == [1]
    assert end.prefix_page_ids() == [1, 3]
    tree.check_invariants()


def test_a_list_of_page_ids_stays_the_callers():
    tree = RadixTree(page_size=1)
    root = tree.root(None)
    tree.lock(root)
    page_ids = [1, 2]
    _, node = tree.extend(root, [1, 2], page_ids)
    page_ids.append(3)
    found = tree.match(None, [1, 2]).page_ids
    found.append(4)
    assert node.page_ids == [1, 2]


def test_a_split_keeps_the_ends_of_its_holders():
    tree = RadixTree(page_size=1)
    long = insert(tree, [1, 2, 3, 4], 1)
    short = tree.match(None, [1, 2, 9]).node
    tree.lock(short)
    assert (short.num_prefix_pages, short.lock_ref) == (2, 2)
    assert (long.num_prefix_pages, long.lock_ref) == (4, 1)
    assert long.parent is short
    tree.unlock(long)
    assert tree.num_unlocked == 2
    assert sorted(tree.evict(4)) == [3, 4]  # what `short` holds stays
    assert short.prefix_page_ids() == [1, 2]
    tree.check_invariants()


def test_ancestors_end_where_asked():
    tree = RadixTree(page_size=2)
    tokens = list(range(12))
    node = insert(tree, tokens, 1)
    for num_pages in (4, 2, 6, 0, 5, 1, 3):
        above = tree.ancestor(node, num_pages)
        assert above.prefix_tokens() == token_bytes(tokens[: 2 * num_pages])
        assert tree.ancestor(node, num_pages) is above
        tree.check_invariants()
    assert tree.ancestor(node, 6) is node
    assert tree.ancestor(node, 0) is tree.root(None)


def test_locked_pages_are_never_evicted():
    tree = RadixTree(page_size=1)
    held = insert(tree, [1, 2, 3], 1)
    tree.unlock(insert(tree, [1, 2, 7, 8], 10))
    tree.unlock(insert(tree, [5], 20))
    assert tree.num_unlocked == 3
    assert sorted(tree.evict(100)) == [10, 11, 20]
    assert tree.evict(1) == []
    assert held.prefix_page_ids() == [1, 2, 3]
    tree.unlock(held)
    assert sorted(tree.evict(100)) == [1, 2, 3]
    assert tree.num_pages == tree.num_namespaces == 0


def test_a_leaf_that_is_used_again_stays():
    """It could go once, so it has an entry in the heap; the entry must not count."""
    tree = RadixTree(page_size=1)
    for tokens in ([1], [2]):
        tree.unlock(insert(tree, tokens, tokens[0]))
    held = insert(tree, [1], 10)
    assert tree.evict(2) == [2]
    tree.unlock(held)
    assert tree.evict(2) == [1]


def test_a_node_with_children_goes_after_them():
    """The parent's entry from when it was a leaf is still in the heap, and older than theirs."""
    tree = RadixTree(1, "fifo")
    parent = insert(tree, [1], 1)
    tree.unlock(parent)
    tree.lock(parent)
    first = insert(tree, [1, 2], 2)
    tree.unlock(parent)
    tree.unlock(first)
    assert tree.evict(1) == [2]
    assert tree.evict(1) == [1]


def test_a_lock_moves_down_over_the_nodes_between():
    tree = RadixTree(page_size=1)
    deep = insert(tree, [1, 2, 3, 4], 1)
    top = tree.ancestor(deep, 1)
    middle = tree.ancestor(deep, 3)
    tree.unlock(deep)
    tree.lock(top)
    tree.move_lock(top, middle)
    assert [node.lock_ref for node in deep.path()] == [1, 1, 1, 0]
    assert tree.num_unlocked == 1
    with pytest.raises(ValueError, match="moved down"):
        tree.move_lock(middle, top)
    with pytest.raises(ValueError, match="not locked"):
        tree.move_lock(deep, deep)
    tree.unlock(middle)
    assert tree.num_unlocked == 4
    tree.check_invariants()


@pytest.mark.parametrize(
    ("eviction", "order"),
    [
        ("lru", [2, 4, 3, 1]),
        ("lfu", [4, 3, 2, 1]),
        ("fifo", [1, 2, 3, 4]),
        ("priority", [4, 3, 2, 1]),
    ],
)
def test_the_policy_decides_who_goes_first(eviction, order):
    """Four prompts of a page. Both 3 and 4 have least hits and matter least, 4 was used before."""
    tree = RadixTree(1, eviction)
    for token, priority in zip([1, 2, 3, 4], [0, 1, 5, 5], strict=True):
        tree.unlock(insert(tree, [token], token, priority=priority))
    for token in [1, 1, 2, 2, 4, 3, 1]:
        tree.count_hit(tree.match(None, [token]).node)
    assert [tree.evict(1) for _ in order] == [[token] for token in order]


def test_a_peek_is_not_a_use():
    tree = RadixTree(page_size=1)
    for token in (1, 2):
        tree.unlock(insert(tree, [token], token))
    assert tree.peek(None, [1]) == 1
    assert tree.evict(1) == [1]
    assert tree.peek("never seen", [1]) == 0
    assert tree.num_namespaces == 1


def test_a_leaf_is_trimmed_from_its_tail():
    tree = RadixTree(page_size=2)
    tree.unlock(insert(tree, [1, 1, 2, 2, 3, 3], 1))
    assert tree.evict(1) == [3]
    assert tree.match(None, [1, 1, 2, 2, 3, 3]).page_ids == [1, 2]
    assert tree.evict(1) == [2]
    assert tree.match(None, [1, 1, 2, 2, 3, 3]).page_ids == [1]
    tree.check_invariants()


def test_a_late_request_makes_the_whole_path_important():
    tree = RadixTree(1, "priority")
    tree.unlock(insert(tree, [1, 2], 1, priority=9))
    tree.unlock(insert(tree, [5], 5, priority=3))
    tree.unlock(insert(tree, [1, 2, 3], 3, priority=0))
    assert tree.evict(1) == [5]


def test_namespaces_seen_once_leave_nothing_behind():
    tree = RadixTree(page_size=2)
    for salt in range(100):
        tree.match(salt, [1, 2])  # looked at, never locked
        assert tree.num_namespaces <= 1
    for salt in range(100):
        root = tree.root(("held", salt))
        tree.lock(root)
        tree.unlock(root)
    assert tree.num_namespaces == 0
    for salt in range(100):
        tree.unlock(insert(tree, [1, 2], salt, namespace=salt))
    assert tree.num_namespaces == 100
    tree.evict(100)
    assert tree.num_namespaces == 0
    tree.match("looked at", [1, 2])
    assert tree.clear() == []
    assert tree.num_namespaces == 0


def test_a_locked_root_outlives_its_pages():
    tree = RadixTree(page_size=1)
    root = tree.match(None, [1]).node
    tree.lock(root)
    tree.unlock(insert(tree, [1], 1))
    assert tree.evict(1) == [1]
    tree.root("another")
    assert tree.root(None) is root
    assert tree.extend(root, [2], [2])[0] == [2]
    assert tree.match(None, [2]).page_ids == [2]


def test_use_costs_the_heap_nothing():
    """However often pages are used between two evictions, the heap keeps one entry for a node."""
    tree = RadixTree(page_size=1)
    for _ in range(200):
        for token in range(5):
            tree.unlock(insert(tree, [token], token))
    assert len(tree._heap._entries) == 5
    for token in range(4):
        tree.match(None, [token])
    assert tree.evict(1) == [4]


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_every_form_of_token_ids_is_the_same(form):
    tokens = [0, 1, 255, 256, 128_000, 2**31 - 1]
    tree = RadixTree(page_size=2)
    insert(tree, tokens, 1)
    assert tree.peek(None, FORMATS[form](tokens)) == 3
    assert tree.match(None, FORMATS[form](tokens)).page_ids == [1, 2, 3]


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([2**31], "must fit int32"),
        (np.array([2**31]), "must fit int32"),
        (b"abc", "got 3 bytes"),
        (np.zeros((1, 2), np.int32), "one dimension"),
        (np.zeros(2, np.float32), "must be integers"),
    ],
)
def test_what_cannot_be_token_ids_is_refused(token_ids, message):
    with pytest.raises(ValueError, match=message):
        RadixTree(page_size=1).match(None, token_ids)


def test_options_are_checked():
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        RadixTree(0)
    with pytest.raises(ValueError, match=r"eviction must be one of .*'lru'.*got 'random'"):
        RadixTree(1, "random")


def test_misuse_is_refused():
    tree = RadixTree(page_size=2)
    root = tree.root(None)
    with pytest.raises(ValueError, match="must be locked"):
        tree.extend(root, [1, 2], [1])
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(root)
    tree.lock(root)
    with pytest.raises(ValueError, match="page_ids has 2 pages, token_ids fill 1"):
        tree.extend(root, [1, 2, 3], [1, 2])
    _, node = tree.extend(root, [1, 2], [1])
    with pytest.raises(ValueError, match="between 0 and 1, got 2"):
        tree.ancestor(node, 2)
    tree.unlock(node)
    tree.evict(1)
    for gone in (node, root):
        with pytest.raises(ValueError, match="no longer in the tree"):
            tree.lock(gone)
        with pytest.raises(ValueError, match="no longer in the tree"):
            tree.ancestor(gone, 0)


DAMAGE = {
    "num_pages": lambda tree, leaf: setattr(tree, "num_pages", 9),
    "^7 != ": lambda tree, leaf: setattr(tree, "num_unlocked", 7),
    "lock went missing": lambda tree, leaf: setattr(leaf, "lock_ref", 5),
    "twice in the tree": lambda tree, leaf: leaf.page_ids.__setitem__(0, 1),
    "another first page": lambda tree, leaf: leaf.tokens.__setitem__(0, 99),
    "not full": lambda tree, leaf: leaf.tokens.append(0),
    "no pages": lambda tree, leaf: (leaf.page_ids.clear(), leaf.tokens.clear()),
    "num_prefix_pages": lambda tree, leaf: setattr(leaf, "num_prefix_pages", 9),
    "another parent": lambda tree, leaf: setattr(leaf, "parent", None),
    "another namespace": lambda tree, leaf: setattr(leaf, "namespace", "b"),
    "more recent": lambda tree, leaf: setattr(leaf, "last_used", 99),
    "older": lambda tree, leaf: setattr(leaf, "created", -1),
    "hit more often": lambda tree, leaf: setattr(leaf, "num_hits", 99),
    "more important": lambda tree, leaf: setattr(leaf, "priority", -1),
    "unlocked leaf is missing": lambda tree, leaf: (tree._heap.pop(), tree._heap.pop()),
    "two heap entries": lambda tree, leaf: tree._heap._entries.append(tree._heap._entries[0]),
    "evicted node": lambda tree, leaf: tree._heap.push(RadixNode("b", None, bytearray(), [], 0, 4)),
    "wrong about its heap": lambda tree, leaf: setattr(leaf, "queued", False),
    "overstates": lambda tree, leaf: tree._heap._entries.__setitem__(0, ((99,), 0, leaf)),
    "left behind": lambda tree, leaf: tree._roots.__setitem__(
        "b", RadixNode("b", None, bytearray(), [], 0, 4)
    ),
}


@pytest.mark.parametrize("message", sorted(DAMAGE))
def test_damage_is_found(message):
    tree = RadixTree(page_size=1)
    tree.unlock(insert(tree, [1, 2], 1))
    tree.unlock(insert(tree, [1, 3], 3))
    leaf = tree.match(None, [1, 2]).node
    tree.check_invariants()
    DAMAGE[message](tree, leaf)
    with pytest.raises(AssertionError, match=message):
        tree.check_invariants()
