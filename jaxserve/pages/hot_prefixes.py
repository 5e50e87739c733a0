"""`PrefixInfo`: the prefixes that the radix tree was asked for most often. Made for whoever looks on.

Invariant: a parent is hit at least as often and used at least as recently as each of its children
(`RadixTree`), so the first few nodes in that order are a tree of their own: with each node its
parent is among them, and stands before it.
"""

import heapq
from array import array
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from jaxserve.pages.radix_node import TOKEN_BYTES, RadixNode
from jaxserve.pages.radix_tree import RadixTree


@dataclass(frozen=True, kw_only=True)
class PrefixInfo:
    """A run of cached tokens: a node of the radix tree.

    Args:
        parent: place in the list of what it goes on from; None = it begins a prompt.
        num_tokens: tokens from the beginning of the prompt to its end.
        num_own_tokens: those of them that it adds to its parent.
        num_pages: pages that hold what it adds.
        num_users: sequences that use it now.
        num_hits: sequences that found it in the cache, since it is there.
        num_uses_ago: how many other uses of the cache there were since it was used last.
        is_private: its namespace is not everybody's, so its tokens are not told.
        token_ids: the first tokens that it adds; none if it is private.
    """

    parent: int | None
    num_tokens: int
    num_own_tokens: int
    num_pages: int
    num_users: int
    num_hits: int
    num_uses_ago: int
    is_private: bool
    token_ids: tuple[int, ...]


def hottest_prefixes(
    tree: RadixTree | None,
    *,
    max_prefixes: int,
    max_token_ids: int,
    is_private: Callable[[Hashable], bool],
) -> tuple[PrefixInfo, ...]:
    """The nodes with the most hits, among equals the most recently used; parents before children.

    Args:
        tree: the prefix cache; None = there is none.
        max_prefixes: most nodes to return.
        max_token_ids: most token ids to tell of each.
        is_private: whether the tokens of a namespace are kept secret.
    """
    if tree is None:
        return ()
    nodes = (node for node in tree.nodes() if node.parent is not None)
    found = heapq.nsmallest(max_prefixes, nodes, key=_coldness)
    places = {id(node): place for place, node in enumerate(found)}
    return tuple(
        _info(node, places, tree, 0 if is_private(node.namespace) else max_token_ids)
        for node in found
    )


def _coldness(node: RadixNode) -> tuple[int, int, int]:
    return (-node.num_hits, -node.last_used, node.num_prefix_pages)


def _info(
    node: RadixNode, places: dict[int, int], tree: RadixTree, max_token_ids: int
) -> PrefixInfo:
    token_ids = array("i", bytes(node.tokens[: max_token_ids * TOKEN_BYTES]))
    return PrefixInfo(
        parent=places.get(id(node.parent)),
        num_tokens=node.num_prefix_pages * tree.page_size,
        num_own_tokens=len(node.page_ids) * tree.page_size,
        num_pages=len(node.page_ids),
        num_users=node.lock_ref,
        num_hits=node.num_hits,
        num_uses_ago=tree.clock - node.last_used,
        is_private=max_token_ids == 0,
        token_ids=tuple(token_ids),
    )
