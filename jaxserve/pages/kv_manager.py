"""Match, allocate, copy, swap and free the KV pages of one sequence. Used by the scheduler; owns the
`PagePool`, the `RadixTree` and the host tier.

Who owns a page: every page table that names it, and the tree. A page that only the tree owns is
*cached*: it can be evicted when pages are needed.

    all pages = null page + free + cached + owned (named by at least one page table)

Copy-on-write is one rule, in `grow`: before a step writes into a page that has another owner, the
table gets a copy of its own; the last owner writes in place. So a prefix hit that reaches into the
last token's page, samples, beams and branches all need nothing else.

What has to be moved before the next step is collected until `take_moves`. Pages that such a move
still reads are not lent again before that.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.pages.page_pool import PagePool
from jaxserve.pages.page_table import PageTable
from jaxserve.pages.radix_tree import RadixNode, RadixTree
from jaxserve.pages.tiers import HostPages, PageTier

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class PrefixMatch:
    """The longest known prefix of some tokens. Void after the next change of the tree: `adopt` it
    at once.

    Args:
        page_ids: full pages that hold it.
        num_tokens: tokens known, at least one less than asked for: somebody has to compute logits.
        node: where it ends in the tree; None without a tree.
    """

    page_ids: Sequence[int] = ()
    num_tokens: int = 0
    node: RadixNode | None = None


class PageMoves(NamedTuple):
    """What to do with pages before the next step, in this order.

    Args:
        moves_out: (device page, host page).
        copies: (source page, target page); no target is a source.
        moves_in: (host page, device page).
    """

    moves_out: Pairs
    copies: Pairs
    moves_in: Pairs


class KVManager:
    """The KV pages, seen by one sequence at a time.

    Args:
        num_pages: pages in the pool, the null page included.
        page_size: tokens a page.
        max_model_len: most tokens of a sequence; gives the length of a table row.
        enable_prefix_caching: keep computed pages in a radix tree; False = no tree.
        eviction: a key of `eviction.EVICTIONS`.
        num_host_pages: pages of the host tier; 0 = none.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        eviction: str = "lru",
        num_host_pages: int = 0,
    ):
        self.page_size = page_size
        self.max_pages_per_seq = -(-max_model_len // page_size)
        self._has_tree = enable_prefix_caching
        self._eviction = eviction
        self._num_host_pages = num_host_pages
        self._start(num_pages)

    def _start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(self.page_size, self._eviction) if self._has_tree else None
        self.host = PageTier("host", self._num_host_pages)
        self._moves_out: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int]] = []
        self._moves_in: list[tuple[int, int]] = []
        self._read_by_copies: Counter[int] = Counter()  # device pages, each with one owner more
        self._read_by_moves: list[int] = []  # host pages

    def reset(self) -> None:
        """Forgets every owner and every cached page; tables made before are void."""
        self._start(self.pool.num_pages)

    @property
    def num_slots(self) -> int:
        """Tokens that fit in an empty pool: no request can ever hold more."""
        return self.pool.num_usable * self.page_size

    @property
    def num_cached_pages(self) -> int:
        """Pages that only the tree owns."""
        return self.tree.num_unlocked if self.tree is not None else 0

    @property
    def num_available_pages(self) -> int:
        """Pages that are free, or would be after evicting all that is cached. Until `take_moves`
        this may count pages that a copy still reads: one for each table that copied at most.
        """
        return self.pool.num_free + self.num_cached_pages

    @property
    def num_owned_pages(self) -> int:
        """Pages named by a page table."""
        return self.pool.num_usable - self.num_available_pages

    def new_table(self) -> PageTable:
        return PageTable(self.max_pages_per_seq, self.page_size)

    def peek(self, namespace: Hashable, token_ids: Sequence[int]) -> int:
        """Tokens that `match` would find, without counting as a use of them."""
        if self.tree is None:
            return 0
        num_pages = self.tree.peek(namespace, token_ids)
        return min(num_pages * self.page_size, len(token_ids) - 1)

    def match(
        self, namespace: Hashable, token_ids: Sequence[int], copy_last_page: bool = True
    ) -> PrefixMatch:
        """The longest cached prefix of `token_ids`.

        Args:
            namespace: only pages computed under an equal one are found.
            token_ids: i32 ids, at least one.
            copy_last_page: also find the page of the last token, which has to be computed again and
                therefore into a copy.
        """
        if self.tree is None:
            return PrefixMatch()
        page_ids, node = self.tree.match(namespace, token_ids)
        if not copy_last_page and len(page_ids) * self.page_size == len(token_ids):
            page_ids = page_ids[:-1]
            node = self.tree.ancestor(node, len(page_ids))
        num_tokens = min(len(page_ids) * self.page_size, len(token_ids) - 1)
        return PrefixMatch(page_ids=page_ids, num_tokens=num_tokens, node=node)

    def adopt(self, table: PageTable, match: PrefixMatch) -> None:
        """Puts a match's pages at the start of an empty table: it owns them too and locks them."""
        if self.tree is None or match.node is None:
            return
        self.tree.lock(match.node)
        self.pool.share(match.page_ids)
        table.append(match.page_ids)
        table.node, table.num_tree_pages = match.node, len(match.page_ids)

    def count_hit(self, table: PageTable) -> None:
        """Says that what was adopted will be used: eviction by hits counts it."""
        if self.tree is not None and table.node is not None:
            self.tree.count_hit(table.node)

    def grow(self, table: PageTable, num_tokens: int, write_from: int) -> bool:
        """Makes a table ready for a step: room for `num_tokens` tokens, and no other owner of the
        pages that positions from `write_from` on fall into.

        Returns:
            False, with the table unchanged, when there are too few pages.
        """
        if num_tokens <= table.num_writable:  # true of most steps
            return True
        missing = table.num_missing(num_tokens)
        shared = self._shared_pages(table, write_from, num_tokens)
        page_ids = self._take(missing + len(shared))
        if page_ids is None:
            return False
        for index in shared:
            source, target = table[index], page_ids.pop()
            self._copies.append((source, target))
            self._read_by_copies[source] += 1  # the table's share of it lasts until take_moves
            table.replace(index, target)
        if shared and shared[0] < table.num_tree_pages:
            self._unlock_down_to(table, shared[0])
        if page_ids:
            table.append(page_ids)
        # What was looked at is its own now; a page behind `num_tokens` may still be shared.
        table.num_writable = -(-num_tokens // self.page_size) * self.page_size
        return True

    def num_needed(self, table: PageTable, num_tokens: int, write_from: int) -> int:
        """Pages that `grow` would take."""
        shared = self._shared_pages(table, write_from, num_tokens)
        return table.num_missing(num_tokens) + len(shared)

    def _shared_pages(self, table: PageTable, write_from: int, num_tokens: int) -> list[int]:
        first = write_from // self.page_size
        end = min(len(table), -(-num_tokens // self.page_size))
        return [index for index in range(first, end) if self._num_owners(table[index]) > 1]

    def _num_owners(self, page_id: int) -> int:
        return self.pool.ref_count(page_id) - self._read_by_copies.get(page_id, 0)

    def _unlock_down_to(self, table: PageTable, num_pages: int) -> None:
        """Leaves a table only the first `num_pages` pages of its path in the tree."""
        assert self.tree is not None
        assert table.node is not None
        node = self.tree.ancestor(table.node, num_pages)
        self.tree.lock(node)
        self.tree.unlock(table.node)
        table.node, table.num_tree_pages = node, num_pages

    def _take(self, num_pages: int) -> list[int] | None:
        """Free pages, after evicting cached ones as needed; None when that is not enough."""
        if num_pages > self.num_available_pages:
            return None
        while self.tree is not None and num_pages > self.pool.num_free:
            evicted = self.tree.evict(num_pages - self.pool.num_free)
            if not evicted:
                break
            self.pool.release(evicted)  # free now, unless a copy still reads it
        return self.pool.alloc(num_pages)

    def record(
        self, table: PageTable, token_ids: Sequence[int], num_tokens: int, priority: int = 0
    ) -> None:
        """Puts the pages that computed tokens have filled into the tree, for others to find.

        Where the tree has a page for the same tokens already, the table takes that one and gives up
        its own.

        Args:
            table: of the sequence.
            token_ids: i32 ids of the sequence, at least `num_tokens`.
            num_tokens: tokens computed, all of them in pages of the table.
            priority: of the request, for eviction by priority.
        """
        first, end = table.num_tree_pages, num_tokens // self.page_size
        if self.tree is None or end <= first:
            return
        assert table.node is not None
        own = table.row[first:end].tolist()
        new_tokens = token_ids[first * self.page_size : end * self.page_size]
        kept, table.node = self.tree.extend(table.node, new_tokens, own, priority)
        table.num_tree_pages = end
        for index, (mine, theirs) in enumerate(zip(own, kept, strict=True), start=first):
            self.pool.share((theirs,))
            if mine != theirs:
                self.pool.release((mine,))
                table.replace(index, theirs)

    def fork(self, table: PageTable, num_tokens: int) -> PageTable:
        """A table that shares the pages of the first `num_tokens` tokens."""
        child = self.new_table()
        table.num_writable = 0
        num_pages = min(len(table), -(-num_tokens // self.page_size))
        page_ids = table.row[:num_pages].tolist()
        self.pool.share(page_ids)
        child.append(page_ids)
        if self.tree is not None and table.node is not None:
            child.num_tree_pages = min(num_pages, table.num_tree_pages)
            child.node = self.tree.ancestor(table.node, child.num_tree_pages)
            self.tree.lock(child.node)
        return child

    def free(self, table: PageTable) -> None:
        """Gives up every page of the table; those in the tree stay there, cached."""
        if self.tree is not None and table.node is not None:
            self.tree.unlock(table.node)
        self.pool.release(table.clear())

    def swap_out(self, table: PageTable, num_tokens: int) -> HostPages | None:
        """Moves the first `num_tokens` tokens to host pages and gives up every page of the table.

        Returns:
            None, with nothing changed, when the host tier has too few free pages.
        """
        num_pages = -(-num_tokens // self.page_size)
        host_ids = self.host.alloc(num_pages)
        if host_ids is None:
            return None
        self._moves_out.extend(zip(table.row[:num_pages].tolist(), host_ids, strict=True))
        self.free(table)
        return HostPages(host_ids, num_tokens)

    def swap_in(self, table: PageTable, first_page: int, host_pages: HostPages) -> None:
        """Moves host pages to the pages of a table from its number `first_page` on, which have just
        been made for it, and gives all of them up.
        """
        wanted = host_pages.page_ids[first_page:]
        targets = table.row[first_page : len(host_pages.page_ids)].tolist()
        self._moves_in.extend(zip(wanted, targets, strict=True))
        self._read_by_moves.extend(wanted)
        self._release_host(host_pages.page_ids[:first_page])

    def drop_host_pages(self, host_pages: HostPages) -> None:
        """Gives up what a sequence has in the host tier."""
        self._release_host(host_pages.page_ids)

    def _release_host(self, page_ids: Sequence[int]) -> None:
        """Frees host pages at once. What was to be moved there in the next step is forgotten: two
        moves into one page would have no order.
        """
        if self._moves_out:
            gone = set(page_ids)
            self._moves_out = [move for move in self._moves_out if move[1] not in gone]
        self.host.release(page_ids)

    def take_moves(self) -> PageMoves:
        """What has to be done before the next step; what it reads may be lent again after it."""
        moves = PageMoves(tuple(self._moves_out), tuple(self._copies), tuple(self._moves_in))
        for page_id, count in self._read_by_copies.items():
            self.pool.release([page_id] * count)
        self.host.release(self._read_by_moves)
        self._read_by_copies.clear()
        for pending in (self._moves_out, self._copies, self._moves_in, self._read_by_moves):
            pending.clear()
        return moves

    def evict_all(self) -> int:
        """Gives up every cached page; returns how many."""
        if self.tree is None:
            return 0
        page_ids = self.tree.evict(self.tree.num_unlocked)
        self.pool.release(page_ids)
        return len(page_ids)

    def clear_cache(self) -> int:
        """Frees every cached page; returns how many. Nobody may own a page of the tree."""
        if self.tree is None:
            return 0
        page_ids = self.tree.clear()
        self.pool.release(page_ids)
        return len(page_ids)

    def check_invariants(
        self, tables: Sequence[PageTable], host_pages: Sequence[HostPages] = ()
    ) -> None:
        """Raises AssertionError unless free + cached + owned = all, the owners are exactly these
        tables and the tree, and every table has locked what it uses of the tree.
        """
        self.pool.check_invariants()
        self.host.check_invariants()
        assert not self._read_by_copies, "a page is kept for a copy that was made"
        owners = Counter(page_id for table in tables for page_id in table.page_ids)
        owned = set(owners)
        cached = set()
        if self.tree is not None:
            self.tree.check_invariants()
            in_tree = [page_id for node in self.tree.nodes() for page_id in node.page_ids]
            owners.update(in_tree)
            cached = set(in_tree) - owned
            self._check_paths(self.tree, tables)
        for page_id in range(self.pool.num_pages):
            found, count = self.pool.ref_count(page_id), owners[page_id]
            assert found == count, f"page {page_id}: ref_count {found}, owners {count}"
        assert len(cached) == self.num_cached_pages, "an unlocked page of the tree is in use"
        assert self.pool.num_free + len(cached) + len(owned) == self.pool.num_usable, (
            "a page is lost"
        )
        lent = sum(len(pages.page_ids) for pages in host_pages)
        assert lent == self.host.num_pages - self.host.num_free, "a host page is lost"

    def _check_paths(self, tree: RadixTree, tables: Sequence[PageTable]) -> None:
        """Every table begins with the path to its node, and the locks of the tree are theirs."""
        locks: Counter[RadixNode] = Counter()
        for table in tables:
            if table.node is None:
                assert len(table) == 0, "pages without a place in the tree"
                continue
            path = table.node.prefix_page_ids()
            assert path == table.page_ids[: table.num_tree_pages], "not the path to its node"
            locks.update(table.node.path())
        for node in tree.nodes():
            assert node.lock_ref == locks[node], f"lock_ref {node.lock_ref}, users {locks[node]}"
