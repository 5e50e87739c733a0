"""One sequence's pages, in order. Filled and emptied by `KVManager`; read when a batch is built.

position p of the sequence lives in slot  page_ids[p // page_size] * page_size + p % page_size
"""

import numpy as np

from jaxserve.pages.page_pool import NULL_PAGE


class PageTable:
    """A row of the batch's page table, kept as it will be sent: unused entries are the null page.

    Args:
        max_pages: pages that a sequence of max_model_len tokens needs (P).
        page_size: tokens a page (B).
    """

    def __init__(self, max_pages: int, page_size: int):
        self.page_size = page_size
        self._row = np.full(max_pages, NULL_PAGE, np.int32)  # i32[P]
        self._num_pages = 0

    def __len__(self) -> int:
        return self._num_pages

    @property
    def row(self) -> np.ndarray:
        """i32[P], the null page beyond `len(self)`. A view: copy what outlives the next change."""
        return self._row

    @property
    def page_ids(self) -> list[int]:
        return self._row[: self._num_pages].tolist()

    @property
    def num_slots(self) -> int:
        """Tokens that fit in the pages owned."""
        return self._num_pages * self.page_size

    def num_missing(self, num_tokens: int) -> int:
        """Pages to add before `num_tokens` tokens fit; 0 when they fit already."""
        return max(0, -(-num_tokens // self.page_size) - self._num_pages)

    def append(self, page_ids: list[int]) -> None:
        """Adds pages at the end."""
        end = self._num_pages + len(page_ids)
        if end > len(self._row):
            raise ValueError(f"{end} pages pass the row's limit of {len(self._row)}")
        self._row[self._num_pages : end] = page_ids
        self._num_pages = end

    def clear(self) -> list[int]:
        """Empties the table and returns the page ids it held."""
        held = self.page_ids
        self._row[: self._num_pages] = NULL_PAGE
        self._num_pages = 0
        return held
