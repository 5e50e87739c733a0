"""The fixed pool of KV pages: a free list and a reference count per page.

Used by `KVManager` alone. Page 0 is the null page: padding tokens write there, so it is never
handed out.

Invariant: every page but the null page is either free (ref_count 0, once in the free list) or owned
(ref_count > 0).

    page ids   0      1 .. num_pages - 1
               null   free | owned
"""

from collections.abc import Iterable, Sequence

NULL_PAGE = 0


class PagePool:
    """Hands out page ids and counts their owners.

    Args:
        num_pages: pages in the pool, the null page included; at least 2.
    """

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(
                f"num_pages must be at least 2 (null page and one more), got {num_pages}"
            )
        self.num_pages = num_pages
        self._ref_counts = [0] * num_pages
        self._free = list(
            range(num_pages - 1, NULL_PAGE, -1)
        )  # a stack: low ids first, hot ids again

    @property
    def num_usable(self) -> int:
        """Pages that sequences can own: all but the null page."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, page_id: int) -> int:
        return self._ref_counts[page_id]

    @property
    def ref_counts(self) -> Sequence[int]:
        """Of every page, by page id. Not a copy: to be read only."""
        return self._ref_counts

    def alloc(self, num_pages: int) -> list[int] | None:
        """Takes `num_pages` pages, each with one owner; None (and nothing taken) when fewer are
        free.
        """
        if num_pages > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(num_pages)]
        for page_id in taken:
            self._ref_counts[page_id] = 1
        return taken

    def share(self, page_ids: Iterable[int]) -> None:
        """Adds an owner to pages that are owned already."""
        for page_id in page_ids:
            self._require_owned(page_id)
            self._ref_counts[page_id] += 1

    def release(self, page_ids: Iterable[int]) -> None:
        """Takes an owner away; a page without owners is free again."""
        for page_id in page_ids:
            self._require_owned(page_id)
            self._ref_counts[page_id] -= 1
            if self._ref_counts[page_id] == 0:
                self._free.append(page_id)

    def _require_owned(self, page_id: int) -> None:
        if self._ref_counts[page_id] <= 0:
            raise ValueError(f"page {page_id} has no owner")

    def check_invariants(self) -> None:
        """Raises AssertionError when a page is lost, free twice, or free and owned at once."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert NULL_PAGE not in free, "the null page is in the free list"
        assert self._ref_counts[NULL_PAGE] == 0, "the null page has an owner"
        for page_id in range(1, self.num_pages):
            owned = self._ref_counts[page_id] > 0
            assert self._ref_counts[page_id] >= 0, f"page {page_id} has a negative ref_count"
            assert owned != (page_id in free), f"page {page_id} is lost, or free and owned at once"
