"""Block hits counted the plain way: an LRU list of block ids, no pages, no tokens, no scheduler.

The independent truth for the simulator's sequential block_hit_rate, used by its tests and by
scripts/scheduling_figures. A hit is a block of the longest prefix of a prompt whose blocks are all in
the list. Of blocks used by the same request the last ones go first, so a prefix outlives what follows.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


def hit_rate(prompts: Iterable[Sequence[int]], capacity: int | None) -> float:
    """Blocks found / blocks, one prompt after another.

    Args:
        prompts: the block ids of each.
        capacity: blocks kept; None = all.
    """
    known: OrderedDict[int, None] = OrderedDict()  # least recently used first
    num_hits = num_blocks = 0
    for blocks in prompts:
        num_blocks += len(blocks)
        for block in blocks:
            if block not in known:
                break
            num_hits += 1
        for block in reversed(blocks):
            known[block] = None
            known.move_to_end(block)
        while capacity is not None and len(known) > capacity:
            known.popitem(last=False)
    return num_hits / num_blocks
