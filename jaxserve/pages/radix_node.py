"""A node of the radix tree: a run of whole pages, and how its tokens are kept and compared.

Made and changed by `RadixTree` alone; a caller holds a node to say "my pages end here".

Invariant: whoever holds a node (has locked it) means its end. A split may move the start of a node
down, never its end; the end moves only when the single holder grows the node or, with nobody
holding it, when eviction trims it.

    root | a b c d e f |  two sequences that share 3 pages:    root | a b c | d e f
                                                                            | x y
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

import numpy as np

TOKEN_BYTES = 4  # int32

TokenIds = bytes | array | np.ndarray | Sequence[int]


class RadixNode:
    """An edge and where it ends. A root has no parent and no pages.

    Args:
        namespace: whose prefixes these are; the same in all nodes below a root.
        parent: None for a root, and for a node that is no longer in the tree.
        tokens: int32 token ids as bytes, a whole number of pages. A bytearray, so that growing or
            trimming by a page does not copy the rest.
        page_ids: the pages that hold them. The list is the node's own from here on.
        page_bytes: bytes of a page of tokens.
        num_prefix_pages: pages from the root to the end of this node.
    """

    __slots__ = (
        "children",
        "created",
        "last_used",
        "lock_ref",
        "namespace",
        "num_hits",
        "num_prefix_pages",
        "page_bytes",
        "page_ids",
        "parent",
        "priority",
        "queued",
        "tokens",
    )

    def __init__(
        self,
        namespace: Hashable,
        parent: RadixNode | None,
        tokens: bytearray,
        page_ids: list[int],
        num_prefix_pages: int,
        page_bytes: int,
    ):
        self.namespace = namespace
        self.parent = parent
        self.tokens = tokens  # i32[len(page_ids) * page_size] as bytes
        self.page_ids = page_ids
        self.num_prefix_pages = num_prefix_pages
        self.page_bytes = page_bytes
        self.children: dict[bytes, RadixNode] = {}  # by the bytes of the child's first page
        self.lock_ref = 0  # users of this node or of a node below it
        self.last_used = 0  # on the tree's clock
        self.created = 0  # on the tree's clock
        self.num_hits = 0  # matched and used by so many sequences
        self.priority = 0  # of the most important request that put or found it here
        self.queued = False  # has an entry in the heap of leaves

    @property
    def start(self) -> int:
        """Pages from the root to the beginning of this node."""
        return self.num_prefix_pages - len(self.page_ids)

    def path(self) -> list[RadixNode]:
        """The nodes from the root to this one."""
        nodes = []
        node: RadixNode | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def prefix_page_ids(self) -> list[int]:
        """The pages from the root to the end of this node."""
        return [page_id for node in self.path() for page_id in node.page_ids]

    def prefix_tokens(self) -> bytes:
        """The int32 token ids from the root to the end of this node, as bytes."""
        return b"".join(node.tokens for node in self.path())

    def first_page(self) -> bytes:
        """The tokens of the first page: the key among the parent's children."""
        return bytes(self.tokens[: self.page_bytes])

    def add_child(self, tokens: bytes, page_ids: list[int]) -> RadixNode:
        """A new node right below: the full pages of `tokens`, the first of which no child has."""
        num_prefix_pages = self.num_prefix_pages + len(page_ids)
        child = RadixNode(
            self.namespace, self, bytearray(tokens), page_ids, num_prefix_pages, self.page_bytes
        )
        self.children[child.first_page()] = child
        return child

    def split(self, num_pages: int) -> RadixNode:
        """Cuts the node after its first `num_pages` pages (not all of them, not a root).

        Returns:
            A new node above the cut, used and locked as this one, which still ends where it did.
        """
        assert self.parent is not None, "a root has no pages to split"
        cut = num_pages * self.page_bytes
        upper = RadixNode(
            self.namespace,
            self.parent,
            self.tokens[:cut],
            self.page_ids[:num_pages],
            self.start + num_pages,
            self.page_bytes,
        )
        upper.lock_ref = self.lock_ref
        upper.last_used = self.last_used
        upper.created = self.created
        upper.num_hits = self.num_hits
        upper.priority = self.priority
        self.parent.children[self.first_page()] = upper
        self.parent = upper
        del self.tokens[:cut]
        del self.page_ids[:num_pages]
        upper.children[self.first_page()] = self
        return upper

    def check_children(self) -> None:
        """Raises AssertionError when something is wrong between this node and those right below."""
        children = self.children.values()
        assert self.lock_ref >= sum(child.lock_ref for child in children), "a lock went missing"
        for first_page, child in self.children.items():
            assert child.parent is self, "a child has another parent"
            assert child.namespace == self.namespace, "a child is in another namespace"
            assert child.page_ids, "a node has no pages"
            assert first_page == child.first_page(), "a child has another first page"
            assert len(child.tokens) == len(child.page_ids) * self.page_bytes, "a page is not full"
            assert child.start == self.num_prefix_pages, "num_prefix_pages is wrong"
            assert child.last_used <= self.last_used, "a child is more recent than its parent"
            assert child.created >= self.created, "a child is older than its parent"
            assert child.num_hits <= self.num_hits, "a child was hit more often than its parent"
            assert child.priority >= self.priority, "a child is more important than its parent"


def token_bytes(token_ids: TokenIds) -> bytes:
    """Token ids as int32 bytes in the machine's order; bytes are taken to be that already.

    Raises:
        ValueError: a length or a shape that cannot be token ids, or one that does not fit int32.
    """
    if isinstance(token_ids, bytes):
        if len(token_ids) % TOKEN_BYTES:
            raise ValueError(f"token_ids must be int32 as bytes, got {len(token_ids)} bytes")
        return token_ids
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids.tobytes()
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
            raise ValueError(
                f"token_ids must be integers in one dimension, got {token_ids.dtype}{token_ids.shape}"
            )
        if token_ids.dtype == np.int32:
            return token_ids.tobytes()
        token_ids = token_ids.tolist()
    try:
        return array("i", token_ids).tobytes()
    except OverflowError as error:
        raise ValueError(f"token_ids must fit int32: {error}") from error


def num_equal_bytes(edge: bytearray, tokens: bytes, begin: int, end: int, page_bytes: int) -> int:
    """How much of `edge` is the same as `tokens[begin:end]`, in bytes, full pages only.

    The first page must be known to be the same.
    """
    most = min(len(edge), end - begin)
    if edge[:most] == tokens[begin : begin + most]:
        return most
    # A bisection over pages in which each round compares only what is not decided yet.
    low, high = 1, most // page_bytes - 1
    while low < high:
        middle = (low + high + 1) // 2
        start, stop = low * page_bytes, middle * page_bytes
        if edge[start:stop] == tokens[begin + start : begin + stop]:
            low = middle
        else:
            high = middle - 1
    return low * page_bytes
