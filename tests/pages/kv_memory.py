"""A memory behind a `KVManager` for its tests: which token every slot holds, on the device and on the
host, and what moves, copies and writes make of it.

A fragment plays the part of a sequence: tokens, how many of them are computed, and where. `Memory`
does what scheduler and executor do with them and refuses what no executor could do.
"""

from dataclasses import dataclass, field

import numpy as np

from jaxserve.pages.kv_manager import KVManager
from jaxserve.pages.page_table import PageTable
from jaxserve.pages.tiers import HostPages

UNWRITTEN = -1


@dataclass(eq=False)
class Fragment:
    """A sequence, as far as pages are concerned."""

    tokens: list[int]
    table: PageTable
    namespace: object = None
    num_computed: int = 0
    num_planned: int = 0  # tokens that the step under way computes
    host_pages: HostPages | None = None

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_computed


@dataclass
class Memory:
    """The content of every page, and the fragments whose tokens it holds."""

    kv: KVManager
    fragments: list[Fragment] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.kv.page_size
        self.device = np.full((self.kv.pool.num_pages, size), UNWRITTEN)
        self.host = np.full((self.kv.host.num_pages, size), UNWRITTEN)

    # What a scheduler does between two steps

    def fork(self, parent: Fragment, num_tokens: int, more: list[int]) -> Fragment:
        tokens = parent.tokens[:num_tokens] + more
        num_shared = min(num_tokens, parent.num_computed, len(tokens) - 1)
        table = self.kv.fork(parent.table, num_shared)
        child = Fragment(tokens, table, parent.namespace, num_computed=num_shared)
        self.fragments.append(child)
        return child

    def free(self, fragment: Fragment) -> None:
        self.kv.free(fragment.table)
        if fragment.host_pages is not None:
            self.kv.drop_host_pages(fragment.host_pages)
        self.fragments.remove(fragment)

    # What it does while it plans one

    def start(
        self,
        tokens: list[int],
        num_tokens: int | None = None,
        *,
        namespace: object = None,
        copy_last_page: bool = True,
    ) -> Fragment | None:
        """Admits new tokens and plans `num_tokens` of them (None = all); None without room."""
        fragment = Fragment(tokens, self.kv.new_table(), namespace)
        return fragment if self.admit(fragment, num_tokens, copy_last_page) else None

    def admit(
        self, fragment: Fragment, num_tokens: int | None = None, copy_last_page: bool = True
    ) -> bool:
        """Plans tokens of one that owns nothing on the device; it may have host pages."""
        match = self.kv.match(fragment.namespace, fragment.tokens, copy_last_page)
        self.kv.adopt(fragment.table, match)
        num_matched = len(fragment.table)
        fragment.num_computed = match.num_tokens
        swapped = fragment.host_pages
        if swapped is not None:
            fragment.num_computed = max(match.num_tokens, swapped.num_tokens)
        if not self.plan(fragment, num_tokens):
            self.kv.free(fragment.table)
            fragment.num_computed = 0
            return False
        if swapped is not None:
            self.kv.swap_in(fragment.table, min(num_matched, len(swapped.page_ids)), swapped)
            fragment.host_pages = None
        if fragment not in self.fragments:
            self.fragments.append(fragment)
        return True

    def plan(self, fragment: Fragment, num_tokens: int | None = None) -> bool:
        """Grows a table for its next tokens (None = all that are left)."""
        num_tokens = fragment.num_left if num_tokens is None else num_tokens
        end = fragment.num_computed + num_tokens
        before = fragment.table.page_ids
        needed = self.kv.num_needed(fragment.table, end, fragment.num_computed)
        available = self.kv.num_available_pages
        if self.kv.grow(fragment.table, end, fragment.num_computed):
            assert needed <= available
            fragment.num_planned = num_tokens
            return True
        assert needed > available - self.num_pinned
        assert fragment.table.page_ids == before
        return False

    @property
    def num_pinned(self) -> int:
        """Pages that count as cached, but are not lent before a copy has read them."""
        return len(self.kv._read_by_copies)

    def swap_out(self, fragment: Fragment) -> bool:
        pages = self.kv.swap_out(fragment.table, fragment.num_computed)
        fragment.host_pages = pages
        if pages is not None:
            fragment.num_computed = 0
        return pages is not None

    # The step itself

    def step(self):
        """Moves, copies, computes what was planned and records it; returns the moves."""
        moves = self.kv.take_moves()
        self._move(moves)
        planned = [one for one in self.fragments if one.num_planned]
        for one in planned:
            self._write(one)
        for one in planned:
            one.num_computed += one.num_planned
            one.num_planned = 0
            self.kv.record(one.table, one.tokens, one.num_computed)
        return moves

    def _move(self, moves) -> None:
        targets = [page for _, page in moves.moves_out]
        assert len(set(targets)) == len(targets), "two moves into one host page"
        for page, host_page in moves.moves_out:
            self.host[host_page] = self.device[page]
        sources = {source for source, _ in moves.copies}
        targets = [page for _, page in (*moves.copies, *moves.moves_in)]
        assert not sources & set(targets), "a copy reads what another one writes"
        assert len(set(targets)) == len(targets), "two moves into one page"
        for source, target in moves.copies:
            self.device[target] = self.device[source]
        for host_page, page in moves.moves_in:
            self.device[page] = self.host[host_page]

    def _write(self, writer: Fragment) -> None:
        size = self.kv.page_size
        for position in range(writer.num_computed, writer.num_computed + writer.num_planned):
            page = writer.table[position // size]
            others = [one for one in self.fragments if one is not writer]
            assert not any(page in one.table.page_ids for one in others), "a shared page is written"
            assert page not in self.cached_pages(), "a page of the tree is written"
            self.device[page, position % size] = writer.tokens[position]

    def cached_pages(self) -> set[int]:
        nodes = self.kv.tree.nodes() if self.kv.tree is not None else ()
        return {page for node in nodes for page in node.page_ids}

    # What has to be true between two steps

    def check(self) -> None:
        """Every table, every swapped fragment and every path of the tree reads back its tokens."""
        tables = [one.table for one in self.fragments]
        swapped = [one.host_pages for one in self.fragments if one.host_pages is not None]
        self.kv.check_invariants(tables, swapped)
        for one in self.fragments:
            if one.host_pages is not None:
                known, content = one.host_pages.num_tokens, self.host[list(one.host_pages.page_ids)]
            else:
                known, content = one.num_computed, self.device[one.table.page_ids]
            assert content.reshape(-1)[:known].tolist() == one.tokens[:known]
        for node in self.kv.tree.nodes() if self.kv.tree is not None else ():
            tokens = np.frombuffer(node.prefix_tokens(), np.int32)
            content = self.device[node.prefix_page_ids()].reshape(-1)
            assert content.tolist() == tokens.tolist(), "the cache has other tokens than it says"

    def num_owned_now(self) -> int:
        return len({page for one in self.fragments for page in one.table.page_ids})
