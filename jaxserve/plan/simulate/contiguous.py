"""What paging replaced: a sequence reserves one run of neighbouring pages for its whole life.

Stand-ins for `KVManager` in the simulator's allocator arms. Nothing is shared and nothing grows: the
first `grow` of a table takes its whole reservation, later ones find the room there.

    contiguous_max    max_model_len slots for everybody
    contiguous_pow2   the power of two that holds the request's prompt and output, by buddies

Source: Orca (Max) and Orca (Pow2) in vLLM (Kwon et al., SOSP 2023), section 6.1. The output's length
is known to pow2 in advance, which flatters it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxserve.pages.kv_manager import KVManager
from jaxserve.pages.page_pool import NULL_PAGE
from jaxserve.pages.page_table import PageTable
from jaxserve.pages.tiers import HostPages

FIRST_PAGE = NULL_PAGE + 1


class RunAllocator(Protocol):
    """Lends runs of neighbouring pages."""

    num_lent: int  # pages in runs that are lent out

    def alloc(self, num_pages: int) -> range | None:
        """A run of at least `num_pages` pages; None when there is no such run."""
        ...

    def release(self, run: range) -> None: ...

    def check_invariants(self) -> None: ...


class FixedRuns:
    """Runs of one length, cut once and for all.

    Args:
        num_pages: pages to cut up.
        run_pages: pages of each run; what is left over at the end is never used.
    """

    def __init__(self, num_pages: int, run_pages: int):
        self._run_pages = run_pages
        self._num_runs = num_pages // run_pages
        starts = (FIRST_PAGE + i * run_pages for i in range(self._num_runs))
        self._free = [range(start, start + run_pages) for start in starts][::-1]
        self.num_lent = 0

    def alloc(self, num_pages: int) -> range | None:
        if num_pages > self._run_pages:
            raise ValueError(f"{num_pages} pages pass the run's {self._run_pages}")
        if not self._free:
            return None
        self.num_lent += self._run_pages
        return self._free.pop()

    def release(self, run: range) -> None:
        if run in self._free:
            raise ValueError(f"run {run} is free already")
        self._free.append(run)
        self.num_lent -= self._run_pages

    def check_invariants(self) -> None:
        """Raises AssertionError when a run is lost or free twice."""
        assert len(set(self._free)) == len(self._free), "a run is free twice"
        free = len(self._free) * self._run_pages
        assert free + self.num_lent == self._num_runs * self._run_pages, "a run is lost"


class BuddyRuns:
    """Runs of a power of two pages: a free run is halved until it fits, and halves that are free
    again join.

    Args:
        num_pages: pages to cut up; cut into powers of two first.

    Source: Knowlton, "A fast storage allocator", CACM 1965.
    """

    def __init__(self, num_pages: int):
        self._num_pages = num_pages
        self._free: dict[int, set[int]] = {}  # pages of a run -> offsets of free runs
        offset, rest = 0, num_pages
        while rest:
            size = 1 << (rest.bit_length() - 1)  # the largest first: offsets stay aligned
            self._free.setdefault(size, set()).add(offset)
            offset, rest = offset + size, rest - size
        self.num_lent = 0

    def alloc(self, num_pages: int) -> range | None:
        wanted = 1 << (num_pages - 1).bit_length()
        size = min((s for s, runs in self._free.items() if s >= wanted and runs), default=None)
        if size is None:
            return None
        offset = min(self._free[size])
        self._free[size].remove(offset)
        while size > wanted:
            size //= 2
            self._free.setdefault(size, set()).add(offset + size)
        self.num_lent += wanted
        return range(FIRST_PAGE + offset, FIRST_PAGE + offset + wanted)

    def release(self, run: range) -> None:
        offset, size = run.start - FIRST_PAGE, len(run)
        if offset in self._free.get(size, ()):
            raise ValueError(f"run {run} is free already")
        self.num_lent -= size
        while (buddy := offset ^ size) in self._free.get(size, ()):
            self._free[size].remove(buddy)
            offset, size = min(offset, buddy), 2 * size
        self._free.setdefault(size, set()).add(offset)

    def check_invariants(self) -> None:
        """Raises AssertionError when pages are lost, free twice, or buddies stand side by side."""
        free: set[int] = set()
        for size, offsets in self._free.items():
            for offset in offsets:
                assert offset % size == 0, "a run is not aligned"
                assert offset ^ size not in offsets, "two free buddies did not join"
                pages = set(range(offset, offset + size))
                assert not pages & free, "a page is free twice"
                free |= pages
        assert len(free) + self.num_lent == self._num_pages, "a page is lost"


class ReservedTable(PageTable):
    """A page table that knows how many tokens it must have room for.

    Args:
        max_pages, page_size: as `PageTable`.
        num_tokens: of the reservation.
    """

    def __init__(self, max_pages: int, page_size: int, num_tokens: int):
        super().__init__(max_pages, page_size)
        self.num_tokens = num_tokens
        self.run: range | None = None


class ContiguousKVManager(KVManager):
    """A `KVManager` whose tables own one run each.

    The scheduler asks for pages before it admits a sequence; once a sequence has its run it needs
    none any more. So a sequence that finds a run needs 0 pages, and one that does not needs more
    than there are.

    Args:
        num_pages: pages in the pool, the null page included.
        page_size: tokens a page.
        max_model_len: most tokens of a sequence.
        make_runs: from the number of pages that can be lent.
        reserve: tokens reserved for a request, from the tokens it will hold.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        make_runs: Callable[[int], RunAllocator],
        reserve: Callable[[int], int],
    ):
        super().__init__(
            num_pages=num_pages,
            page_size=page_size,
            max_model_len=max_model_len,
            enable_prefix_caching=False,
        )
        self.max_pages_per_seq = self._pages(reserve(max_model_len))
        self.runs = make_runs(num_pages - 1)
        self._reserve = reserve

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    @property
    def num_available_pages(self) -> int:
        return self.pool.num_usable

    @property
    def num_owned_pages(self) -> int:
        return self.runs.num_lent

    def reserved_table(self, num_tokens: int) -> ReservedTable:
        """A table for a request that will hold `num_tokens` tokens at its end."""
        return ReservedTable(self.max_pages_per_seq, self.page_size, self._reserve(num_tokens))

    def num_needed(self, table: PageTable, num_tokens: int, write_from: int) -> int:
        del num_tokens, write_from
        assert isinstance(table, ReservedTable)
        if table.run is not None:
            return 0
        run = self.runs.alloc(self._pages(table.num_tokens))
        if run is None:
            return self.num_available_pages + 1
        self.runs.release(run)
        return 0

    def grow(self, table: PageTable, num_tokens: int, write_from: int) -> bool:
        assert isinstance(table, ReservedTable)
        if table.run is None:
            table.run = self.runs.alloc(self._pages(table.num_tokens))
            if table.run is None:
                return False
            table.append(table.run)
        if num_tokens > table.num_slots:
            raise ValueError(f"{num_tokens} tokens pass the reservation of {table.num_slots}")
        return True

    def free(self, table: PageTable) -> None:
        assert isinstance(table, ReservedTable)
        if table.run is not None:
            self.runs.release(table.run)
            table.run = None
        table.clear()

    def check_invariants(
        self, tables: Sequence[PageTable], host_pages: Sequence[HostPages] = ()
    ) -> None:
        """Raises AssertionError unless what is lent is exactly what these tables hold."""
        self.runs.check_invariants()
        assert not host_pages, "a sequence was swapped"
        pages: list[int] = []
        for table in tables:
            assert isinstance(table, ReservedTable)
            assert table.page_ids == list(table.run or ()), "a table holds other pages than its run"
            pages += table.page_ids
        assert len(set(pages)) == len(pages), "two tables share a page"
        assert len(pages) == self.runs.num_lent, "a run is lost"


def contiguous_max(*, num_pages: int, page_size: int, max_model_len: int) -> ContiguousKVManager:
    """Reserves max_model_len for everybody; arguments as `KVManager`."""
    run_pages = -(-max_model_len // page_size)
    return ContiguousKVManager(
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=max_model_len,
        make_runs=lambda usable: FixedRuns(usable, run_pages),
        reserve=lambda num_tokens: max_model_len,
    )


def contiguous_pow2(*, num_pages: int, page_size: int, max_model_len: int) -> ContiguousKVManager:
    """Reserves the power of two that holds the request; arguments as `KVManager`."""
    return ContiguousKVManager(
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=max_model_len,
        make_runs=BuddyRuns,
        reserve=lambda num_tokens: 1 << (num_tokens - 1).bit_length(),
    )
