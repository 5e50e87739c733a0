"""One sequence's pages, in order. Filled and emptied by `KVManager`; read when a batch is built.

position p of the sequence lives in slot  page_ids[p // page_size] * page_size + p % page_size

    pages   | path to `node` in the radix tree | own pages ............ |
            0                     num_tree_pages            len(table)

With the prefix cache on, the first `num_tree_pages` pages are exactly those on the tree's path to
`node`, which the table has locked.
"""

from collections.abc import Sequence

import numpy as np

from jaxserve.pages.radix_tree import RadixNode


class PageTable:
    """The page ids of a sequence.

    Args:
        max_pages: pages that a sequence of max_model_len tokens needs (P).
        page_size: tokens a page (B).
    """

    def __init__(self, max_pages: int, page_size: int):
        self.page_size = page_size
        self.node: RadixNode | None = None
        self.num_tree_pages = 0
        # Slots up to which the next writes fall into pages that nobody else owns; 0 = not known.
        self.num_writable = 0
        self.version = 0  # changes whenever the pages do
        self._max_pages = max_pages
        self._row = np.empty(min(max_pages, 8), np.int32)
        self._num_pages = 0

    def __len__(self) -> int:
        return self._num_pages

    def __getitem__(self, index: int) -> int:
        return int(self._row[index])

    @property
    def row(self) -> np.ndarray:
        """i32[len(self)]. A view: copy what outlives the next change."""
        return self._row[: self._num_pages]

    @property
    def page_ids(self) -> list[int]:
        return self.row.tolist()

    @property
    def num_slots(self) -> int:
        """Tokens that fit in the pages owned."""
        return self._num_pages * self.page_size

    def num_missing(self, num_tokens: int) -> int:
        """Pages to add before `num_tokens` tokens fit; 0 when they fit already."""
        return max(0, -(-num_tokens // self.page_size) - self._num_pages)

    def append(self, page_ids: Sequence[int]) -> None:
        """Adds pages at the end."""
        end = self._num_pages + len(page_ids)
        if end > self._max_pages:
            raise ValueError(f"{end} pages pass the row's limit of {self._max_pages}")
        if end > len(self._row):
            grown = np.empty(min(self._max_pages, max(end, 2 * len(self._row))), np.int32)
            grown[: self._num_pages] = self.row
            self._row = grown
        self._row[self._num_pages : end] = page_ids
        self._num_pages = end
        self.version += 1

    def replace(self, index: int, page_id: int) -> None:
        """Puts another page in the place of one."""
        self._row[index] = page_id
        self.version += 1

    def clear(self) -> list[int]:
        """Empties the table and returns the page ids it held."""
        held = self.page_ids
        self._num_pages = self.num_tree_pages = self.num_writable = 0
        self.node = None
        self.version += 1
        return held
