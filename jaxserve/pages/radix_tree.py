"""The prefix cache: which pages hold which tokens, for every prefix computed so far.

Used by `KVManager` alone, which does the counting of owners: the tree is one owner of each page in
it and knows no `PagePool`. A sequence locks the node where its full pages end; a node is locked as
long as it or one below it is in use, and only unlocked leaves are evicted.

Nothing is shared across namespaces, and what is compared is the tokens themselves: an edge keeps
them, and a child is found by the bytes of its first page.

Invariants: pages = pages of locked nodes + num_unlocked; below an unlocked node nothing is locked;
a parent is at least as recently used, as often hit and as important as each child, so giving up
leaves in that order gives up pages in that order.

Source: RadixAttention in SGLang (Zheng et al. 2023, section 3).
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple, Protocol

from jaxserve.pages.eviction import EVICTIONS, LeafHeap
from jaxserve.pages.radix_node import (
    TOKEN_BYTES,
    RadixNode,
    TokenIds,
    num_equal_bytes,
    token_bytes,
)


class TreeMatch(NamedTuple):
    """The longest known prefix.

    Args:
        page_ids: the pages that hold it, in order.
        node: where it ends: the namespace's root when nothing is known. Lock it before anything
            else is asked of the tree.
    """

    page_ids: list[int]
    node: RadixNode


class TreeListener(Protocol):
    """Told of every page that enters or leaves, so that others can know what is here.

    `token_ids` are int32 as bytes, of the whole prefix from the root; the last `num_pages` pages of
    it are the ones that came or went.
    """

    def inserted(self, namespace: Hashable, token_ids: bytes, num_pages: int) -> None: ...

    def evicted(self, namespace: Hashable, token_ids: bytes, num_pages: int) -> None: ...


class RadixTree:
    """Prefixes in full pages.

    Args:
        page_size: tokens a page.
        eviction: a name in `EVICTIONS`.
        listener: told of pages that enter or leave; costs nothing when None.

    Token ids are given as array('i'), a list, a numpy array of integers, or int32 as bytes; only
    their full pages are looked at.
    """

    def __init__(self, page_size: int, eviction: str = "lru", listener: TreeListener | None = None):
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        if eviction not in EVICTIONS:
            raise ValueError(f"eviction must be one of {sorted(EVICTIONS)}, got {eviction!r}")
        self.page_size = page_size
        self.num_pages = 0
        self.num_unlocked = 0  # pages in nodes with lock_ref 0: evict can give up all of them
        self._page_bytes = page_size * TOKEN_BYTES
        self._listener = listener
        self._heap = LeafHeap(EVICTIONS[eviction])
        self._roots: dict[Hashable, RadixNode] = {}
        self._newest_root: RadixNode | None = None
        self.clock = 0  # counts uses; `RadixNode.last_used` and `created` are told by it

    @property
    def num_namespaces(self) -> int:
        return len(self._roots)

    def peek(self, namespace: Hashable, token_ids: TokenIds) -> int:
        """How many full pages `match` would find. Changes nothing: no use is noted."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        path, num_over = self._find(root, token_bytes(token_ids))
        return path[-1].num_prefix_pages - num_over if path else 0

    def match(self, namespace: Hashable, token_ids: TokenIds) -> TreeMatch:
        """The longest prefix of `token_ids` in full pages; its path is as if just used.

        Returns:
            Its pages and a node that ends exactly there (an edge is split if needed). The node is
            not locked yet; `count_hit` says that its pages are put to use.
        """
        root = self.root(namespace)
        self.clock += 1
        root.last_used = self.clock
        page_ids: list[int] = []
        path = self._descend(root, token_bytes(token_ids))
        for node in path:
            node.last_used = self.clock
            page_ids += node.page_ids
        return TreeMatch(page_ids, path[-1] if path else root)

    def count_hit(self, node: RadixNode) -> None:
        """Counts a hit of every page up to the end of `node`, which the caller has locked.

        Not a part of `match`: who waits for room may match its prefix in every step, and uses it
        once.
        """
        for step in node.path():
            step.num_hits += 1

    def root(self, namespace: Hashable) -> RadixNode:
        """The node where every prefix of `namespace` begins, made on first use.

        An empty root lives as long as it is locked; one that was never locked, until the next one
        is made. So namespaces that are never seen again leave nothing behind.
        """
        root = self._roots.get(namespace)
        if root is None:
            if self._newest_root is not None:
                self._drop_if_empty(self._newest_root)
            root = RadixNode(namespace, None, bytearray(), [], 0, self._page_bytes)
            root.created = self.clock
            self._roots[namespace] = self._newest_root = root
        return root

    def extend(
        self, node: RadixNode, token_ids: TokenIds, page_ids: Sequence[int], priority: int = 0
    ) -> tuple[list[int], RadixNode]:
        """Puts the full pages that follow `node` in the tree and moves the caller's lock to their
        end.

        A leaf that only the caller uses grows in place, so that a decoding sequence is one node
        (with the age and the hits of its first page), unless the new pages are less important.

        Args:
            node: where the caller's pages ended; locked by the caller.
            token_ids: the tokens after it.
            page_ids: the pages that hold them, one for each full page of `token_ids`.
            priority: smaller is more important; the whole path becomes at least as important.

        Returns:
            The pages that the tree has for these tokens, and the node that ends there. Where a page
            is not the caller's the tree had one already: the caller's is a duplicate.

        Raises:
            ValueError: `node` is not locked, or the numbers of pages differ.
        """
        tokens = token_bytes(token_ids)
        num_given = len(tokens) // self._page_bytes
        if len(page_ids) != num_given:
            raise ValueError(f"page_ids has {len(page_ids)} pages, token_ids fill {num_given}")
        if not node.lock_ref:
            raise ValueError("node must be locked before it is extended")
        self.clock += 1
        path = self._descend(node, tokens)
        end = path[-1] if path else node
        self.move_lock(node, end)
        for step in end.path():
            step.last_used = self.clock
            step.priority = min(step.priority, priority)
        known = [page_id for step in path for page_id in step.page_ids]
        if len(known) == num_given:
            return known, end
        first_new = len(known)
        tail = tokens[first_new * self._page_bytes : num_given * self._page_bytes]
        added = list(page_ids[first_new:])
        return known + added, self._append(end, tail, added, priority)

    def _append(
        self, node: RadixNode, tokens: bytes, page_ids: list[int], priority: int
    ) -> RadixNode:
        """Adds pages after `node`, which the caller has locked; the locked node where they end."""
        only_mine = node.lock_ref == 1 and not node.children and node.parent is not None
        if only_mine and node.priority == priority:
            node.tokens += tokens
            node.page_ids += page_ids
            node.num_prefix_pages += len(page_ids)
        else:
            child = node.add_child(tokens, page_ids)
            child.lock_ref = 1
            child.last_used = child.created = self.clock
            child.priority = priority
            node = child
        self.num_pages += len(page_ids)
        if self._listener is not None:
            self._listener.inserted(node.namespace, node.prefix_tokens(), len(page_ids))
        return node

    def lock(self, node: RadixNode) -> None:
        """Keeps `node` and all above it from being evicted until `unlock`.

        Raises:
            ValueError: the node has been evicted since it was matched.
        """
        self._require_in_tree(node)
        self._lock_up_to(node, None)

    def unlock(self, node: RadixNode) -> None:
        """Takes back one `lock`.

        Raises:
            ValueError: the node is not locked.
        """
        if not node.lock_ref:
            raise ValueError("node is not locked")
        step: RadixNode | None = node
        while step is not None:
            step.lock_ref -= 1
            if not step.lock_ref:
                self.num_unlocked += len(step.page_ids)
                self._offer(step)
            step = step.parent

    def move_lock(self, node: RadixNode, below: RadixNode) -> None:
        """Moves one lock from `node` down to `below`; touches only the nodes between.

        Raises:
            ValueError: `below` is not below `node`, or `node` is not locked.
        """
        if not node.lock_ref:
            raise ValueError("node is not locked")
        step: RadixNode | None = below
        while step is not node:
            if step is None:
                raise ValueError("a lock can only be moved down to a node below")
            step = step.parent
        self._lock_up_to(below, node)

    def _lock_up_to(self, node: RadixNode, top: RadixNode | None) -> None:
        """One more lock on `node` and what is above it, `top` and above left out."""
        step: RadixNode | None = node
        while step is not top and step is not None:
            if not step.lock_ref:
                self.num_unlocked -= len(step.page_ids)
            step.lock_ref += 1
            step = step.parent

    def ancestor(self, node: RadixNode, num_pages: int) -> RadixNode:
        """The node on the path to `node` that ends `num_pages` pages below the root; an edge is
        split if needed. It is locked as `node` is; lock it to keep it for longer.

        Raises:
            ValueError: the path is shorter, or the node has been evicted.
        """
        self._require_in_tree(node)
        if not 0 <= num_pages <= node.num_prefix_pages:
            raise ValueError(
                f"num_pages must be between 0 and {node.num_prefix_pages}, got {num_pages}"
            )
        while node.parent is not None and node.start >= num_pages:
            node = node.parent
        if node.num_prefix_pages == num_pages:
            return node
        return node.split(num_pages - node.start)

    def evict(self, num_pages: int) -> list[int]:
        """Forgets up to `num_pages` pages, from unlocked leaves in the order of the policy.

        A leaf is trimmed from its tail when fewer are needed; one that becomes empty disappears,
        and its parent may be the next leaf.

        Returns:
            The pages given up: fewer than asked for when fewer are unlocked.
        """
        given_up: list[int] = []
        while len(given_up) < num_pages:
            leaf = self._heap.pop()
            if leaf is None:
                break
            num_trimmed = min(len(leaf.page_ids), num_pages - len(given_up))
            given_up += self._trim(leaf, num_trimmed)
        self.num_pages -= len(given_up)
        self.num_unlocked -= len(given_up)
        return given_up

    def _trim(self, leaf: RadixNode, num_pages: int) -> list[int]:
        """Takes the last pages off an unlocked leaf, and the leaf out of the tree if none is
        left.
        """
        if self._listener is not None:
            self._listener.evicted(leaf.namespace, leaf.prefix_tokens(), num_pages)
        keep = len(leaf.page_ids) - num_pages
        trimmed = leaf.page_ids[keep:]
        if keep:
            del leaf.page_ids[keep:]
            del leaf.tokens[keep * self._page_bytes :]
            leaf.num_prefix_pages -= num_pages
            self._heap.push(leaf)
            return trimmed
        parent = leaf.parent
        assert parent is not None, "a root was offered for eviction"
        del parent.children[leaf.first_page()]
        leaf.parent = None
        self._offer(parent)
        return trimmed

    def clear(self) -> list[int]:
        """Forgets every page of every namespace.

        Returns:
            The pages given up.

        Raises:
            RuntimeError: something is locked; nothing is changed.
        """
        locked = [namespace for namespace, root in self._roots.items() if root.lock_ref]
        if locked:
            raise RuntimeError(
                f"{self.num_pages - self.num_unlocked} of {self.num_pages} pages are in use,"
                f" in namespaces {locked[:3]} ({len(locked)} in all): unlock them before clear()"
            )
        given_up = self.evict(self.num_pages)
        self._roots.clear()
        self._newest_root = None
        return given_up

    def _offer(self, node: RadixNode) -> None:
        """Offers a node for eviction if it is an unlocked leaf; drops an unlocked empty root."""
        if node.parent is None:
            self._drop_if_empty(node)
        elif not node.lock_ref and not node.children:
            self._heap.push(node)

    def _drop_if_empty(self, root: RadixNode) -> None:
        if not root.lock_ref and not root.children and self._is_root(root):
            del self._roots[root.namespace]

    def _is_root(self, node: RadixNode) -> bool:
        return self._roots.get(node.namespace) is node

    def _require_in_tree(self, node: RadixNode) -> None:
        if node.parent is None and not self._is_root(node):
            raise ValueError("node is no longer in the tree: lock a match before anything else")

    def _find(self, node: RadixNode, tokens: bytes) -> tuple[list[RadixNode], int]:
        """The nodes below `node` that hold the beginning of `tokens`, and how many pages of the
        last of them go beyond it.
        """
        size = self._page_bytes
        end = len(tokens) // size * size
        begin = 0
        path = []
        while begin < end:
            child = node.children.get(tokens[begin : begin + size])
            if child is None:
                break
            path.append(child)
            length = num_equal_bytes(child.tokens, tokens, begin, end, size)
            if length < len(child.tokens):
                return path, (len(child.tokens) - length) // size
            begin += length
            node = child
        return path, 0

    def _descend(self, node: RadixNode, tokens: bytes) -> list[RadixNode]:
        """`_find`, with the last node split where the tokens end or differ."""
        path, num_over = self._find(node, tokens)
        if num_over:
            path[-1] = path[-1].split(len(path[-1].page_ids) - num_over)
        return path

    def nodes(self) -> Iterator[RadixNode]:
        """Every node, parents before children."""
        below = list(self._roots.values())
        while below:
            node = below.pop()
            yield node
            below += node.children.values()

    def check_invariants(self) -> None:
        """Raises AssertionError when a count, a link, an order or the heap of leaves is wrong."""
        for namespace, root in self._roots.items():
            assert root.namespace == namespace, "a root is misplaced"
            assert not root.tokens, "a root has tokens"
            assert root.num_prefix_pages == 0, "a root has pages"
            assert root.children or root.lock_ref or root is self._newest_root, (
                f"the empty root of {namespace!r} was left behind"
            )
        nodes = []
        for node in self.nodes():
            node.check_children()
            nodes += node.children.values()
        page_ids = [page_id for node in nodes for page_id in node.page_ids]
        assert len(set(page_ids)) == len(page_ids), "a page is twice in the tree"
        assert self.num_pages == len(page_ids), f"num_pages {self.num_pages} != {len(page_ids)}"
        num_unlocked = sum(len(node.page_ids) for node in nodes if not node.lock_ref)
        assert self.num_unlocked == num_unlocked, f"{self.num_unlocked} != {num_unlocked}"
        self._heap.check_invariants(nodes)
