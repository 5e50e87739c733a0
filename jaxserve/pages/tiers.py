"""Where a page may live besides the device: tiers, and the pages of a sequence that moved to one.

Used by `KVManager`, which records the moves; the executor carries them out. There is one tier today,
host RAM, to which preempted sequences are swapped.

Invariant: every page of a tier is either free (once in its free list) or lent out.
"""

from collections.abc import Iterable
from typing import NamedTuple


class HostPages(NamedTuple):
    """What a swapped sequence has in host RAM.

    Args:
        page_ids: pages of the host tier, in the order of the sequence; they hold it from its first
            token on.
        num_tokens: tokens they hold; the last page may be partly filled.
    """

    page_ids: tuple[int, ...]
    num_tokens: int


class PageTier:
    """A store of pages beside the device: which of its pages are free.

    Args:
        name: for messages, such as "host".
        num_pages: pages it has; 0 = there is no such tier.
    """

    def __init__(self, name: str, num_pages: int):
        if num_pages < 0:
            raise ValueError(f"the {name} tier cannot have {num_pages} pages")
        self.name = name
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._lent = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def lent(self) -> bytes:
        """A byte for each page: 1 = lent out, 0 = free."""
        return bytes(self._lent)

    def alloc(self, num_pages: int) -> tuple[int, ...] | None:
        """Lends `num_pages` pages; None, with nothing lent, when fewer are free."""
        if num_pages > len(self._free):
            return None
        taken = tuple(self._free.pop() for _ in range(num_pages))
        for page_id in taken:
            self._lent[page_id] = 1
        return taken

    def release(self, page_ids: Iterable[int]) -> None:
        """Takes pages back."""
        for page_id in page_ids:
            if not self._lent[page_id]:
                raise ValueError(f"page {page_id} of the {self.name} tier is free already")
            self._lent[page_id] = 0
            self._free.append(page_id)

    def check_invariants(self) -> None:
        """Raises AssertionError when a page is lost, or free twice."""
        assert len(set(self._free)) == len(self._free), f"{self.name}: a page is free twice"
        assert not any(self._lent[page_id] for page_id in self._free), f"{self.name}: free and lent"
        assert len(self._free) + sum(self._lent) == self.num_pages, f"{self.name}: a page is lost"
