"""The body of the Hopper kernel that attends rows with several new tokens.

Called by `gpu_chunks`, which makes the list of tiles and packs the queries.

A row's queries that share a KV head are one list of query rows, token by token, the G heads of a
token side by side. A tile is 64 or 128 query rows of it, starting at a token: short chunks and grouped
heads fill the rows of wgmma alike. Lists begin at a multiple of 8 rows of a packed array: so a tile
is copied straight from and to the swizzled buffers of wgmma, in blocks of 8 rows, and a list's last
block is its own. Programs walk over a list of tiles made on the device, so nothing runs for tiles
that the batch does not have.

    memory warpgroup    for each page of each tile: TMA into a slot of the ring, wait until it has
                        landed, clean or widen it, hand it over; loads run ahead into the next tile
    compute warpgroups  for each page: S = Q K^T, mask, online softmax in f32, O = O * alpha + P V

The two compute warpgroups divide a tile by query rows, 64 each. O of 64 rows and 256 columns would
take half of the registers and spill: at head_dim 256 they divide its columns instead, and each
computes all of S.

Invariants:
- Positions are counted from a row's first page (`kv_lens - kv_starts`): attention depends on
  differences of positions alone.
- Only pages in which the tile sees a key are fetched. What it does not see in them may be anything,
  NaN included: scores are masked, and values that no token of the tile sees are zeroed, as
  0 * NaN is NaN. Query rows beyond the tile's may be NaN too: no sum runs over query rows.
- A buffer that wgmma or TMA reads is committed after it was written; the race detector of the
  interpreter does not see wgmma, so those places are few: `_Kernel.widen`, `clean`, `attend_page`,
  `put_results`.

Source: online softmax, Milakov and Gimelshein 2018; warp specialisation, FlashAttention-3, Shah et
al. 2024.
"""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.ragged_paged_attention import layout
from pallas_kernels.ragged_paged_attention.gpu_blocks import (
    BF16,
    BYTE_ROWS,
    F32,
    I32,
    LOG2E,
    MASKED,
    PAGE,
    ROWS,
    full,
    matmul,
    tanh,
)

NUM_COMPUTE = 2  # compute warpgroups
WG_ROWS = 64  # query rows of each: M of wgmma
WG_COLUMNS = 128  # the most columns of O that one holds in registers
BLOCK = 64  # columns of a swizzled buffer
EIGHT = 8  # rows of a block of a swizzled buffer
# As many programs as an H100 or H200 has multiprocessors; one fits on each.
NUM_PROGRAMS = 132
# Registers a thread: three warpgroups share 65,536, which would be 168 each.
MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232
PER_ROW = ROWS.reduce(1)  # f32 [M], one value for each row of a product


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known when the kernel is compiled.

    Args:
        num_kv_heads: K.
        group: G, query heads of one KV head.
        head_dim: D.
        kv_dtype: element type of the pool.
        num_tiles: the most tiles that a batch of this bucket can have.
        window, soft_cap, has_sinks: options of the call.
        interpreted: whether it runs in the interpreter, where every program costs time.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    kv_dtype: Any
    num_tiles: int = 0
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    interpreted: bool

    @property
    def column_parts(self) -> int:
        """Warpgroups that share the columns of a query row."""
        return -(-self.head_dim // WG_COLUMNS)

    @property
    def wg_columns(self) -> int:
        """Columns of O of a compute warpgroup."""
        return self.head_dim // self.column_parts

    @property
    def tile_rows(self) -> int:
        """Query rows of a tile: 128, or 64 where the warpgroups share columns."""
        return NUM_COMPUTE // self.column_parts * WG_ROWS

    @property
    def passes(self) -> int:
        """Passes over a KV head; more than one only where a token has more query rows than a tile."""
        return -(-self.group // self.tile_rows)

    @property
    def heads(self) -> int:
        """(KV head, pass) pairs."""
        return self.num_kv_heads * self.passes

    @property
    def token_rows(self) -> int:
        """Query rows of a token in a pass: its heads, and padding where whole blocks of them as they
        are would take more rows than a tile has."""
        rows = -(-self.group // self.passes)
        fits = math.lcm(rows, EIGHT) <= self.tile_rows
        return rows if fits else -(-rows // EIGHT) * EIGHT

    @property
    def token_step(self) -> int:
        """The fewest tokens whose query rows are whole blocks of 8."""
        return EIGHT // math.gcd(self.token_rows, EIGHT)

    @property
    def tile_tokens(self) -> int:
        """The most tokens of a tile."""
        step = self.token_step
        return self.tile_rows // (self.token_rows * step) * step

    @property
    def num_programs(self) -> int:
        """Programs, each with every num_programs-th (tile, head) pair."""
        return min(2 if self.interpreted else NUM_PROGRAMS, self.num_tiles * self.heads)

    @property
    def widens(self) -> bool:
        """Whether pages are converted to bf16 on their way."""
        return layout.is_8bit(self.kv_dtype)

    @property
    def num_landing(self) -> int:
        """Slots of the ring that TMA writes to, as many as shared memory has room for."""
        return 3 if self.column_parts == 1 else 2

    @property
    def num_slots(self) -> int:
        """Slots that compute reads: those that TMA writes to, or those with the widened pages."""
        return self.num_landing - 1 if self.widens else self.num_landing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refs:
    """The kernel's arguments. A field left None does not exist in this program."""

    # GMEM
    q: Any  # bf16[heads, rows, D]
    pool: Any  # [N, K, 2, 64, D]
    table: Any  # i32[S, P]
    tiles: Any  # i32[tiles, 4] row, first query row, tokens, position of the first token
    num_tiles: Any  # i32[1]
    scales: Any  # f32[2, K] of scores and of values
    sinks: Any = None  # f32[heads, tile_rows] times log2(e), by query row of a tile
    out: Any  # bf16[heads, rows, D]
    lse: Any  # f32[heads, tiles, tile_rows]
    # SMEM
    queries: Any  # bf16[compute, 64, D] queries in, results out
    weights: Any  # bf16[compute, 64, 64] P
    rows: Any  # f32[compute, 64] sinks in, lse out
    kv: Any  # bf16[slots, 2, 64, D]
    narrow: Any = None  # 8-bit [landing, 2, 64, D]
    # barriers
    arrived: Any  # [compute] queries are there
    landed: Any  # [landing] TMA has written a page
    full: Any  # [slots] a page is ready for compute
    empty: Any  # [slots] all compute warpgroups are done with it


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile at work; all fields traced i32 scalars, positions from the row's first page."""

    index: Any
    head: Any
    kv_head: Any
    row: Any
    query_row: Any
    num_tokens: Any
    position: Any


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The body of the kernel: its arguments, and one method for each thing that it does."""

    refs: Refs
    plan: Plan

    # -- what there is to do

    def run(self):
        """The whole kernel, on every warpgroup of every program."""
        warpgroup = lax.axis_index("warpgroup")

        @compat.when(warpgroup == NUM_COMPUTE)
        def _():
            compat.set_max_registers(MEMORY_REGISTERS, action="decrease")
            self.fetch_all()

        @compat.when(warpgroup < NUM_COMPUTE)
        def _():
            compat.set_max_registers(COMPUTE_REGISTERS, action="increase")
            self.for_each_tile(functools.partial(self.attend_tile, warpgroup), I32(0))

    def for_each_tile(self, do, state):
        """Run `do(tile, state) -> state` on this program's tiles; returns the last state."""
        program, programs = lax.axis_index("program"), self.plan.num_programs
        heads = I32(self.plan.heads)
        total = self.refs.num_tiles[0] * heads

        def one(i, state):
            item = program + i * programs
            index, head = lax.div(item, heads), lax.rem(item, heads)
            kv_head = lax.div(head, I32(self.plan.passes))
            fields = (self.refs.tiles[index, x] for x in range(4))
            return do(_Tile(index, head, kv_head, *fields), state)

        return lax.fori_loop(I32(0), _ceil_div(total - program, programs), one, state)

    def first_key(self, tile: _Tile):
        """The first position that the tile sees."""
        if self.plan.window is None:
            return I32(0)
        return jnp.maximum(tile.position - (self.plan.window - 1), 0)

    def pages(self, tile: _Tile):
        """(first page, number of pages) of the row in which the tile sees a key."""
        first = lax.div(self.first_key(tile), I32(PAGE))
        return first, _ceil_div(tile.position + tile.num_tokens, PAGE) - first

    def unmasked(self, tile: _Tile):
        """[first, end) of the pages of which every token of the tile sees every key."""
        end = lax.div(tile.position + 1, I32(PAGE))
        if self.plan.window is None:
            return I32(0), end
        last = tile.position + tile.num_tokens - 1
        return _ceil_div(jnp.maximum(last - (self.plan.window - 1), 0), PAGE), end

    # -- the memory warpgroup

    def fetch_all(self):
        """Bring the pages of all tiles, and wait until compute is done with the last of them.

        A page is handed over while the next ones, be they of another tile, are on their way: what
        compute does at the end of a tile and the start of the next does not stop the loads.
        """
        ahead = self.plan.num_landing - 1
        state = (I32(0), ((I32(0), I32(0)),) * ahead)
        total, on_their_way = self.for_each_tile(self.fetch_tile, state)
        for i, seen in enumerate(on_their_way):
            self.hand_over(total - ahead + i, *seen)
        last = jnp.minimum(total, self.plan.num_slots)

        def drain(i, _):
            compat.barrier_wait(
                self.refs.empty.at[lax.rem(total - last + i, I32(self.plan.num_slots))]
            )

        lax.fori_loop(I32(0), last, drain, None)

    def fetch_tile(self, tile: _Tile, state):
        """Bring the pages of one tile.

        State is the number of pages so far, by which they are known from here on, and what is seen
        of those on their way: [begin, end) from the start of the page.
        """
        first, count = self.pages(tile)
        begin, end = self.first_key(tile), tile.position + tile.num_tokens

        def step(i, state):
            serial, on_their_way = state
            self.hand_over(serial - len(on_their_way), *on_their_way[0])
            self.load_page(tile, first + i, serial)
            start = (first + i) * PAGE
            return serial + 1, (*on_their_way[1:], (begin - start, end - start))

        return lax.fori_loop(I32(0), count, step, state)

    def load_page(self, tile: _Tile, page, serial):
        """Start the two copies of a page; `serial` counts the pages of this program."""
        r, plan = self.refs, self.plan
        slot = lax.rem(serial, I32(plan.num_landing))
        if not plan.widens:
            self.wait_empty(serial)
        page_id = r.table[tile.row, page]
        target = r.narrow if plan.widens else r.kv
        for x in range(2):
            compat.copy_gmem_to_smem(
                r.pool.at[page_id, tile.kv_head, x], target.at[slot, x], r.landed.at[slot]
            )

    def wait_empty(self, serial):
        """Wait until compute has left the slot that page `serial` goes to."""

        @compat.when(serial >= self.plan.num_slots)
        def _():
            compat.barrier_wait(self.refs.empty.at[lax.rem(serial, I32(self.plan.num_slots))])

    def wait_landed(self, landing):
        """Wait until TMA has written both halves of a page."""
        compat.barrier_wait(self.refs.landed.at[landing])

    def hand_over(self, serial, begin, end):
        """Wait until a page has landed, make its values finite and bf16, and give it to compute.

        Its tile sees [begin, end) of it. `serial` is negative before the first page.
        """
        r, plan = self.refs, self.plan
        landing = lax.rem(serial, I32(plan.num_landing))
        slot = lax.rem(serial, I32(plan.num_slots))

        @compat.when(serial >= 0)
        def _():
            self.wait_landed(landing)
            if plan.widens:
                self.wait_empty(serial)
                self.widen(landing, slot)

            @compat.when((begin > 0) | (end < PAGE))
            def _():
                self.clean(slot, begin, end)

            compat.barrier_arrive(r.full.at[slot])

    def widen(self, landing, slot):
        """Convert keys and values of a page to bf16. fp8 goes through f16, the only direct way, and exact."""
        r = self.refs

        def widen_columns(x, columns):
            block = compat.layout_cast(r.narrow[landing, x, :, columns], BYTE_ROWS)
            if block.dtype != jnp.int8:
                block = block.astype(jnp.float16)
            r.kv[slot, x, :, columns] = block.astype(BF16)

        for x in range(2):
            self.for_each_block(functools.partial(widen_columns, x))
        compat.commit_smem()

    def clean(self, slot, begin, end):
        """Zero the values outside [begin, end) of the page."""

        def clean_columns(columns):
            token = compat.gpu_iota(I32, (PAGE, BLOCK), 0, layout=ROWS)
            values = compat.layout_cast(self.refs.kv[slot, 1, :, columns], ROWS)
            seen = (token >= begin) & (token < end)
            self.refs.kv[slot, 1, :, columns] = jnp.where(seen, values, jnp.zeros_like(values))

        self.for_each_block(clean_columns)
        compat.commit_smem()

    def for_each_block(self, do):
        """Run `do(64 columns)` on the columns of a page.

        In a loop: all addresses of a page of head_dim 256 at once would take too many registers.
        """

        def one(block, _):
            do(compat.ds(compat.multiple_of(block * BLOCK, BLOCK), BLOCK))

        lax.fori_loop(I32(0), I32(self.plan.head_dim // BLOCK), one, None)

    # -- a compute warpgroup

    def attend_tile(self, wg, tile: _Tile, done):
        """Attend this warpgroup's query rows of a tile to its pages and write the results."""
        r, plan = self.refs, self.plan
        self.take_queries(wg, tile)
        first, count = self.pages(tile)

        def one_page(i, state, masked):
            slot = lax.rem(done + i, I32(plan.num_slots))
            compat.barrier_wait(r.full.at[slot])
            state = self.attend_page(wg, tile, first + i, slot, masked, state)
            compat.barrier_arrive(r.empty.at[slot])
            return state

        top = (
            compat.layout_cast(r.rows[wg], PER_ROW)
            if plan.has_sinks
            else full((WG_ROWS,), MASKED, PER_ROW)
        )
        total = full((WG_ROWS,), 1.0 if plan.has_sinks else 0.0, PER_ROW)
        acc = tuple(full((WG_ROWS, BLOCK), 0.0, ROWS) for _ in self.column_blocks(wg))
        state = (top, total, acc)
        begin, end = self.unmasked(tile)
        begin, end = jnp.clip(begin - first, 0, count), jnp.clip(end - first, 0, count)
        begin = jnp.minimum(begin, end)
        ranges = [(begin, end, False), (end, count, True)]
        if plan.window is not None:
            ranges.insert(0, (I32(0), begin, True))
        for start, stop, masked in ranges:
            step = functools.partial(one_page, masked=masked)
            state = lax.fori_loop(start, stop, step, state)
        self.put_results(wg, tile, *state)
        return done + count

    def first_row(self, wg):
        """The first of this warpgroup's query rows, from the start of the tile."""
        return lax.div(wg, I32(self.plan.column_parts)) * WG_ROWS

    def first_column(self, wg):
        """The first of this warpgroup's columns of O."""
        part = lax.rem(wg, I32(self.plan.column_parts))
        return compat.multiple_of(part * self.plan.wg_columns, BLOCK)

    def column_blocks(self, wg):
        """This warpgroup's columns of O in slices of 64, the least a swizzled buffer can be cut into.

        O is a tuple of such blocks: adding a product to one takes a second accumulator of its size.
        """
        start = self.first_column(wg)
        blocks = range(0, self.plan.wg_columns, BLOCK)
        return [compat.ds(compat.multiple_of(start + at, BLOCK), BLOCK) for at in blocks]

    def take_queries(self, wg, tile: _Tile):
        """Load the query rows, and the sinks where there are any."""
        r = self.refs
        barrier = r.arrived.at[wg]
        row = compat.multiple_of(tile.query_row + self.first_row(wg), EIGHT)
        source = r.q.at[tile.head, compat.ds(row, WG_ROWS)]
        compat.copy_gmem_to_smem(source, r.queries.at[wg], barrier)
        if self.plan.has_sinks:
            sinks = r.sinks.at[tile.head, compat.ds(self.first_row(wg), WG_ROWS)]
            compat.copy_gmem_to_smem(sinks, r.rows.at[wg], barrier)
        compat.barrier_wait(barrier)

    def attend_page(self, wg, tile: _Tile, page, slot, masked: bool, state):
        """One step of the online softmax; state is (largest score, sum, blocks of O)."""
        r, plan = self.refs, self.plan
        top, total, acc = state
        scores = self.products(wg, slot) * r.scales[0, tile.kv_head]
        if plan.soft_cap is not None:
            scores = tanh(scores) * F32(plan.soft_cap * LOG2E)
        if masked:
            scores = self.mask(wg, tile, page, scores)
        new_top = jnp.maximum(top, scores.max(axis=1))
        alpha = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        total = total * alpha + weights.sum(axis=1)
        r.weights[wg] = weights.astype(BF16)
        compat.commit_smem()
        values = r.kv.at[slot, 1]
        scale = lax.broadcast_in_dim(alpha, (WG_ROWS, BLOCK), [0])
        acc = tuple(
            block * scale + matmul(r.weights.at[wg], values.at[:, columns])
            for block, columns in zip(acc, self.column_blocks(wg), strict=True)
        )
        return new_top, total, acc

    def products(self, wg, slot):
        """Q K^T of a page, f32 [64, 64]."""
        queries, keys = self.refs.queries.at[wg], self.refs.kv.at[slot, 0]

        def product(accumulator):
            self.for_each_block(
                lambda columns: compat.wgmma(
                    accumulator, queries.at[:, columns], keys.at[:, columns].T
                )
            )
            return accumulator[...]

        return compat.run_scoped(product, compat.WgmmaAccumulator((WG_ROWS, PAGE), F32))

    def mask(self, wg, tile: _Tile, page, scores):
        """Scores, MASKED where a query row does not see the key."""
        plan = self.plan
        row = self.first_row(wg) + compat.gpu_iota(I32, (WG_ROWS,), 0, layout=PER_ROW)
        rows = compat.layout_cast(jnp.full((WG_ROWS,), plan.token_rows, I32), PER_ROW)
        token = lax.div(row, rows)
        last = token + (tile.position - page * PAGE)  # the last key of the page that a row sees
        key = compat.gpu_iota(I32, scores.shape, 1, layout=ROWS)
        seen = key <= lax.broadcast_in_dim(last, scores.shape, [0])
        if plan.window is not None:
            seen &= key > lax.broadcast_in_dim(last - plan.window, scores.shape, [0])
        return jnp.where(seen, scores, F32(MASKED))

    def put_results(self, wg, tile: _Tile, top, total, acc):
        """Write the tile's results; its queries are not needed any more."""
        r, parts = self.refs, I32(self.plan.column_parts)
        r.rows[wg] = (top + jnp.log2(total)) * F32(1 / LOG2E)
        factor = lax.broadcast_in_dim(r.scales[1, tile.kv_head] / total, (WG_ROWS, BLOCK), [0])
        for block, columns in zip(acc, self.column_blocks(wg), strict=True):
            r.queries[wg, :, columns] = (block * factor).astype(BF16)
        compat.commit_smem()

        @compat.when(lax.rem(wg, parts) == 0)
        def _():
            rows = compat.ds(self.first_row(wg), WG_ROWS)
            compat.copy_smem_to_gmem(r.rows.at[wg], r.lse.at[tile.head, tile.index, rows])

        self.store_rows(wg, tile)
        compat.wait_smem_to_gmem(0)

    def store_rows(self, wg, tile: _Tile):
        """Start copying the blocks of 8 rows that the tile has: what follows is another tile's."""
        r, first = self.refs, self.first_row(wg)
        rows = tile.num_tokens * self.plan.token_rows - first
        columns = compat.ds(self.first_column(wg), self.plan.wg_columns)

        # By single blocks: several that have but half of the columns are not contiguous.
        def store(block, _):
            at = block * EIGHT
            source = compat.ds(compat.multiple_of(at, EIGHT), EIGHT)
            target = compat.ds(compat.multiple_of(tile.query_row + first + at, EIGHT), EIGHT)
            compat.copy_smem_to_gmem(
                r.queries.at[wg, source, columns], r.out.at[tile.head, target, columns]
            )

        lax.fori_loop(I32(0), jnp.clip(_ceil_div(rows, EIGHT), 0, WG_ROWS // EIGHT), store, None)


def _ceil_div(a, b: int):
    return lax.div(a + (b - 1), I32(b))


def run_kernel(refs: Refs, plan: Plan) -> None:
    """The whole kernel, on every warpgroup of every program."""
    _Kernel(refs, plan).run()
