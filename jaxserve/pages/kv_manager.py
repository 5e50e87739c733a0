"""Match, allocate and free the KV pages of one sequence. Used by the scheduler; owns the
`PagePool`.

A prefix cache plugs in at `match`: whatever it returns, a sequence simply starts at `num_tokens`,
and a full hit still leaves at least one token to run. Without one every match is empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.pages.page_pool import PagePool
from jaxserve.pages.page_table import PageTable


@dataclass(frozen=True, kw_only=True)
class PrefixMatch:
    """The longest known prefix of a prompt.

    Args:
        page_ids: full pages that hold it, already shared with the caller.
        num_tokens: tokens they hold; less than the prompt's length.
    """

    page_ids: tuple[int, ...] = ()
    num_tokens: int = 0


NO_MATCH = PrefixMatch()


class KVManager:
    """The page pool seen by one sequence at a time.

    Args:
        num_pages: pages in the pool, the null page included.
        page_size: tokens a page.
        max_model_len: most tokens of a sequence; gives the length of a table row.
    """

    def __init__(self, *, num_pages: int, page_size: int, max_model_len: int):
        self.pool = PagePool(num_pages)
        self.page_size = page_size
        self.max_pages_per_seq = -(-max_model_len // page_size)

    @property
    def num_slots(self) -> int:
        """Tokens that fit in an empty pool: no request can ever hold more."""
        return self.pool.num_usable * self.page_size

    def reset(self) -> None:
        """Forgets every owner; tables made before are void."""
        self.pool = PagePool(self.pool.num_pages)

    def new_table(self) -> PageTable:
        return PageTable(self.max_pages_per_seq, self.page_size)

    def match(self, token_ids: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix of `token_ids`, shared with the caller (freed again by
        `free`).
        """
        del token_ids  # no cache yet: nothing is known
        return NO_MATCH

    def adopt(self, table: PageTable, match: PrefixMatch) -> None:
        """Puts a match's pages, already shared, at the start of an empty table."""
        table.append(list(match.page_ids))

    def grow(self, table: PageTable, num_tokens: int) -> bool:
        """Adds pages until `num_tokens` tokens fit; False, with nothing changed, when too few are
        free.
        """
        page_ids = self.pool.alloc(table.num_missing(num_tokens))
        if page_ids is None:
            return False
        table.append(page_ids)
        return True

    def free(self, table: PageTable) -> None:
        """Gives up every page of the table."""
        self.pool.release(table.clear())

    def check_invariants(self, tables: Sequence[PageTable]) -> None:
        """Raises AssertionError unless free + owned = all and the owners are exactly these
        tables.
        """
        self.pool.check_invariants()
        owners = [0] * self.pool.num_pages
        for table in tables:
            for page_id in table.page_ids:
                owners[page_id] += 1
        for page_id, count in enumerate(owners):
            found = self.pool.ref_count(page_id)
            assert found == count, f"page {page_id}: ref_count {found}, owners {count}"
