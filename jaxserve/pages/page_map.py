"""`PoolMap`: what every page of the pool is used for, at one moment. Made for whoever looks on.

    all pages = null page + free + cached + owned (by one page table) + shared (by several)

Costs a little per page of the pool, so it is made only when it is asked for.
Invariant: agrees with the counts of `KVManager`; owned and shared together are its owned pages.
"""

import enum
from dataclasses import dataclass

import numpy as np

from jaxserve.pages.kv_manager import KVManager
from jaxserve.pages.page_pool import NULL_PAGE


class PageState(enum.IntEnum):
    """What a page is used for."""

    NULL = 0  # padding is written there
    FREE = 1
    CACHED = 2  # only the prefix cache has it: it can be evicted
    OWNED = 3  # named by one page table
    SHARED = 4  # named by several


@dataclass(frozen=True, kw_only=True)
class PoolMap:
    """The page pool.

    Args:
        states: a byte for each page of the device, a `PageState`.
        host_pages: a byte for each page of the host tier: 1 = lent out, 0 = free. Empty without one.
    """

    states: bytes
    host_pages: bytes


def map_pages(kv: KVManager) -> PoolMap:
    """The pages of a KV manager as they are between two steps."""
    tree = kv.tree
    num_owners = np.array(kv.pool.ref_counts, np.int32)
    in_tree: list[int] = []
    unlocked: list[int] = []
    for node in tree.nodes() if tree is not None else ():
        in_tree += node.page_ids
        if not node.lock_ref:
            unlocked += node.page_ids
    num_owners[in_tree] -= 1  # what is left are page tables
    states = np.full(len(num_owners), PageState.FREE, np.uint8)
    states[num_owners > 0] = PageState.OWNED
    states[num_owners > 1] = PageState.SHARED
    states[unlocked] = PageState.CACHED
    states[NULL_PAGE] = PageState.NULL
    return PoolMap(states=states.tobytes(), host_pages=kv.host.lent)
