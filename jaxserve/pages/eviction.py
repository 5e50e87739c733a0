"""In which order unlocked leaves of the radix tree are given up. Used by `RadixTree` alone.

`EVICTIONS` maps the names of the option `eviction` to a key; the leaf with the least key goes first.

Invariant: the key of a node never becomes less (uses and hits only add up, a node only becomes more
important). So an entry of the heap is a lower bound of its node's key, and it is enough to look
again when the entry comes to the top: using a node costs the heap nothing, each node has at most
one entry, and the heap is never longer than the tree has nodes.
"""

import heapq
from collections.abc import Callable

from jaxserve.pages.radix_node import RadixNode

Key = tuple[int, ...]


def lru(node: RadixNode) -> Key:
    """The least recently used first."""
    return (node.last_used,)


def lfu(node: RadixNode) -> Key:
    """The one with the fewest hits first; among equals the least recently used."""
    return (node.num_hits, node.last_used)


def fifo(node: RadixNode) -> Key:
    """The oldest first, however often it was used."""
    return (node.created,)


def priority(node: RadixNode) -> Key:
    """The least important (the largest number) first; among equals the least recently used."""
    return (-node.priority, node.last_used)


EVICTIONS: dict[str, Callable[[RadixNode], Key]] = {
    "lru": lru,
    "lfu": lfu,
    "fifo": fifo,
    "priority": priority,
}


class LeafHeap:
    """The leaves that may go, the first to go at the top.

    Args:
        key: one of `EVICTIONS`.
    """

    def __init__(self, key: Callable[[RadixNode], Key]):
        self._key = key
        self._entries: list[tuple[Key, int, RadixNode]] = []
        self._num_pushed = 0  # orders entries of equal key, so that nodes are never compared

    def push(self, node: RadixNode) -> None:
        """Adds a leaf that has just become free to go; nothing to do if its entry is still there."""
        if not node.queued:
            node.queued = True
            heapq.heappush(self._entries, self._entry(node))

    def pop(self) -> RadixNode | None:
        """Takes out the unlocked leaf with the least key; None when there is no unlocked leaf."""
        while self._entries:
            key, _, node = self._entries[0]
            if node.lock_ref or node.children:
                heapq.heappop(self._entries)
                node.queued = False
            elif self._key(node) != key:
                heapq.heapreplace(self._entries, self._entry(node))
            else:
                heapq.heappop(self._entries)
                node.queued = False
                return node
        return None

    def _entry(self, node: RadixNode) -> tuple[Key, int, RadixNode]:
        self._num_pushed += 1
        return (self._key(node), self._num_pushed, node)

    def check_invariants(self, nodes: list[RadixNode]) -> None:
        """Raises AssertionError unless every unlocked leaf among `nodes` (all of the tree, without
        roots) has one entry that does not overstate its key, and nothing else is kept.
        """
        alive = {id(node) for node in nodes}
        queued = {id(node) for _, _, node in self._entries}
        assert len(queued) == len(self._entries), "a node has two heap entries"
        assert queued <= alive, "an evicted node is in the heap"
        for key, _, node in self._entries:
            assert key <= self._key(node), f"heap entry {key} overstates the key {self._key(node)}"
        for node in nodes:
            assert node.queued == (id(node) in queued), "a node is wrong about its heap entry"
            assert node.queued or node.lock_ref or node.children, "an unlocked leaf is missing"
