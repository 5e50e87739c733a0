"""`HostStorage`: the pages that are in host RAM, and those on their way there.

Held by `PageMoves`. A host page is one page of every layer in the canonical format. Pages arrive as
device arrays whose transfer is under way; they are written here when somebody reads the storage, when
a step is done, or when too many are on their way.

Invariant: what is read was written before; nobody outside holds a view of the storage.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

MAX_UNDER_WAY = 2  # batches of pages: one is written to host RAM while the next leaves the device


class _Arrival(NamedTuple):
    host_ids: np.ndarray  # i32[n]
    runs: list[slice]  # the layers of each part
    parts: list[jax.Array]  # [n or more, layers, K, 2, page, D] each


class HostStorage:
    """Host pages by id, from 0.

    Args:
        num_pages: host pages; 0 holds none.
        page_shape: (L, K, 2, page, D).
        dtype: of the elements; 8-bit floats come as bytes, and others as they are.
        take: pages on the device -> numpy; of several processes each keeps the heads of its devices, and
            `page_shape` counts those.
    """

    def __init__(
        self,
        num_pages: int,
        page_shape: Sequence[int],
        dtype: Any,
        take: Callable[[jax.Array], np.ndarray] = np.asarray,
    ):
        self._take = take
        # The operating system gives the memory when it is first written.
        self._pages = np.empty((num_pages, *page_shape), dtype)
        self._arrivals: deque[_Arrival] = deque()

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    def receive(
        self, host_ids: np.ndarray, runs: Sequence[slice], parts: Sequence[jax.Array]
    ) -> None:
        """Takes pages whose way from the device begins now.

        Args:
            host_ids: i32[n], distinct.
            runs: the layers of each part.
            parts: one [n or more, layers, K, 2, page, D] per run; what lies beyond n is padding.
        """
        for part in parts:
            if part.is_fully_addressable:
                part.copy_to_host_async()
        self._arrivals.append(_Arrival(host_ids, list(runs), list(parts)))
        while len(self._arrivals) > MAX_UNDER_WAY:
            self._write_oldest()

    def read(self, host_ids: np.ndarray, run: slice) -> np.ndarray:
        """Pages [n, layers of the run, K, 2, page, D] by id i32[n]: a copy, never a view. jax may use
        it in place long after the storage was written again.
        """
        if any(np.isin(host_ids, arrival.host_ids).any() for arrival in self._arrivals):
            self.settle()
        return self._pages[host_ids, run]  # an index of ids copies

    def settle(self) -> None:
        """Writes all that is on its way, and waits for it."""
        while self._arrivals:
            self._write_oldest()

    def forget(self) -> None:
        """Drops what is on its way; what its pages hold means nothing from now on."""
        self._arrivals.clear()

    def release(self) -> None:
        """Gives the memory back; there are as many pages as before, and they hold nothing."""
        self.forget()
        self._pages = np.empty_like(self._pages)

    def check_invariants(self) -> None:
        """Raises AssertionError if something is on its way that has no place here, or too much is."""
        assert len(self._arrivals) <= MAX_UNDER_WAY, len(self._arrivals)
        for arrival in self._arrivals:
            ids = arrival.host_ids
            assert len(np.unique(ids)) == len(ids), ids
            assert ((ids >= 0) & (ids < self.num_pages)).all(), ids
            for run, part in zip(arrival.runs, arrival.parts, strict=True):
                whole = part.is_fully_addressable
                assert not whole or part.shape[1:] == self._pages[0, run].shape, part.shape
                assert part.dtype == self._pages.dtype, part.dtype

    def _write_oldest(self) -> None:
        host_ids, runs, parts = self._arrivals.popleft()
        for run, part in zip(runs, parts, strict=True):
            self._pages[host_ids, run] = self._take(part)[: len(host_ids)]
