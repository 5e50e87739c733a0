"""The body of the TPU kernel: writes the new tokens' keys and values into their pages and attends
every row, single tokens and chunks alike. One program, on one TensorCore.

Called by `tpu`, which prepares the arguments and makes sure that they fit.

    prologue   one HBM -> HBM copy for each page that gets new tokens; all land before any read
    attention  for each row s, for each tile i of its tokens, for each block j of its keys:
                   start fetching what comes after (s, i, j) into the other half of `kv_buf`
                   wait for (s, i, j), multiply, update the running softmax

Fetches form one chain over rows and tiles, so the pipeline never drains between rows. Loops run to
`ranges`: padded rows cost nothing.

Invariants:
- Positions are counted from a row's first page (`kv_lens - kv_starts`): attention depends on
  differences of positions alone, so the kernel never sees where a row's pages begin.
- A tile fetches only pages in which it sees a key, so entries of freed pages are never followed.
- What a tile does not see may be anything, NaN of another row included: scores are masked per key,
  and values outside the tile's range are zeroed, as 0 * NaN is NaN.

Source: online softmax, Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023; ragged rows of a
mixed batch in one TPU kernel, Ragged Paged Attention (jax, tpu-inference).
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.page_bytes import TPU_LANES

F32 = jnp.float32
NEG = -1e30  # finite, so that exp(NEG - NEG) is not NaN; far below any score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known when the kernel is compiled.

    Args:
        num_kv_heads: K.
        head_dim: D.
        group: query heads of one KV head, padded to a power of two that fills 32-bit words.
        pages_per_row: P.
        page_size: tokens a page.
        words, pack: rows of 32-bit words of a token, and rows of elements in one of them.
        block_pages: pages in a block of keys.
        tile_tokens: query tokens in a tile of a row with several; single-token rows have tiles of 1.
        q_dtype, kv_dtype: element types of queries and output, and of the pool.
        window, soft_cap, has_sinks, return_lse: options of the call.
        writes: whether there are new tokens to write.
        interpreted: whether the interpreter will run it.
    """

    num_kv_heads: int
    head_dim: int
    group: int
    pages_per_row: int
    page_size: int
    words: int
    pack: int
    block_pages: int
    tile_tokens: int
    q_dtype: Any
    kv_dtype: Any
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    return_lse: bool
    writes: bool
    interpreted: bool

    @property
    def block_tokens(self) -> int:
        return self.block_pages * self.page_size

    @property
    def width(self) -> int:
        """W: lanes of a query; those of D = 64 stand beside 64 zeros."""
        return max(self.head_dim, TPU_LANES)

    @property
    def compute_dtype(self):
        """What is multiplied: f32 if queries or pool are f32, else bf16. Sums are f32."""
        both = (self.q_dtype, self.kv_dtype)
        return jnp.dtype(F32 if jnp.dtype(F32) in both else jnp.bfloat16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refs:
    """The kernel's arguments. A field left None does not exist in this program."""

    # SMEM
    kv_lens: Any  # i32[S] from the row's first page
    page_table: Any  # i32[S*P]
    cu_q_lens: Any  # i32[S+1]
    next_row: Any  # i32[S+1] the first row at or after s that has tokens; S if there is none
    ranges: Any  # i32[3]
    k_scale: Any  # f32[K] sm_scale included
    v_scale: Any  # f32[K]
    # HBM
    q: Any  # [K, T, G, W]
    pages: Any  # [N, page, words, pack, 128]
    out: Any  # [K, T, G, W]
    new: Any = None  # [T, words, pack, 128]
    pages_in: Any = None  # the input that `pages` is aliased to
    lse: Any = None  # f32[K, T, G, 128]
    # VMEM; a tile has M = tokens * G rows
    sinks: Any = None  # f32[K, G, 128]
    kv_buf: Any  # [2, block, words, pack, 128]
    q_buf: Any  # [K, tile, G, W] where a tile's queries land
    q_rows: Any  # [K, M, W] the tile at work
    top: Any  # f32[K, M, 128] the largest score so far
    total: Any  # f32[K, M, 128] sum of exp(score - top)
    acc: Any  # f32[K, M, W] sum of exp(score - top) * value
    out_buf: Any  # [K, tile, G, W]
    lse_buf: Any = None  # f32[K, tile, G, 128]
    # semaphores
    kv_sem: Any  # [2] one for each half of kv_buf
    q_sem: Any
    out_sem: Any
    write_sem: Any


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Tokens [index * tokens, (index + 1) * tokens) of row `row`, as far as the row has them.

    Args:
        row: s, traced.
        index: i, traced.
        tokens: static.
    """

    row: Any
    index: Any
    tokens: int


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The body of the kernel: its arguments, and one method for each thing that it does."""

    refs: Refs
    plan: Plan

    # -- where things are: scalars from SMEM

    def num_new(self, row):
        return self.refs.cu_q_lens[row + 1] - self.refs.cu_q_lens[row]

    def first_position(self, tile: _Tile):
        """Position of the tile's first token."""
        row = tile.row
        return self.refs.kv_lens[row] - self.num_new(row) + tile.index * tile.tokens

    def end_position(self, tile: _Tile):
        """One past the last position that the tile sees."""
        return jnp.minimum(self.refs.kv_lens[tile.row], self.first_position(tile) + tile.tokens)

    def first_key(self, tile: _Tile):
        """The first position that the tile sees."""
        if self.plan.window is None:
            return jnp.int32(0)
        return jnp.maximum(self.first_position(tile) - self.plan.window + 1, 0)

    def live_tokens(self, tile: _Tile):
        """How many of the tile's tokens exist."""
        return jnp.minimum(tile.tokens, self.num_new(tile.row) - tile.index * tile.tokens)

    def blocks(self, tile: _Tile):
        """[first, end) of the blocks of keys that the tile sees."""
        size = self.plan.block_tokens
        return self.first_key(tile) // size, _ceil_div(self.end_position(tile), size)

    def page_range(self, tile: _Tile, block):
        """[first, end) of the row's pages that the tile sees in this block."""
        page, at = self.plan.page_size, block * self.plan.block_pages
        first = jnp.maximum(at, self.first_key(tile) // page)
        end = _ceil_div(self.end_position(tile), page)
        return first, jnp.minimum(at + self.plan.block_pages, end)

    # -- new tokens into their pages

    def write_new_tokens(self):
        """Copy keys and values of all new tokens into their pages, and wait until they are there."""
        num_rows = self.refs.ranges[2]
        # The same copies twice: all are in flight before the first wait.
        for act in ("start", "wait"):
            lax.fori_loop(0, num_rows, lambda row, _, act=act: self.for_new_pages(row, act), None)

    def for_new_pages(self, row, act: str):
        """Start or wait for the copies of one row: one for each page that gets new tokens."""
        r, page = self.refs, self.plan.page_size
        end = r.kv_lens[row]
        begin = end - self.num_new(row)

        def one_page(index, _):
            first, last = jnp.maximum(begin, index * page), jnp.minimum(end, (index + 1) * page)
            page_id = r.page_table[row * self.plan.pages_per_row + index]
            source = r.new.at[compat.ds(r.cu_q_lens[row] + first - begin, last - first)]
            target = r.pages.at[page_id, compat.ds(first - index * page, last - first)]
            getattr(compat.make_async_copy(source, target, r.write_sem), act)()

        # A row without tokens may end inside a page: it must not copy an empty range.
        last_page = jnp.where(begin < end, _ceil_div(end, page), 0)
        lax.fori_loop(begin // page, last_page, one_page, None)

    # -- pages to VMEM

    def fetch_block(self, tile: _Tile, block, slot):
        """Start copying a block's pages, one by one, into a half of `kv_buf`."""
        r, page = self.refs, self.plan.page_size
        at = block * self.plan.block_pages
        first, end = self.page_range(tile, block)

        def one_page(index, _):
            page_id = r.page_table[tile.row * self.plan.pages_per_row + index]
            target = r.kv_buf.at[slot, compat.ds((index - at) * page, page)]
            compat.make_async_copy(r.pages.at[page_id], target, r.kv_sem.at[slot]).start()

        lax.fori_loop(first, end, one_page, None)

    def wait_block(self, tile: _Tile, block, slot):
        """Wait until a block's pages are there."""
        r, page = self.refs, self.plan.page_size
        first, end = self.page_range(tile, block)
        # A wait counts bytes: one for as many bytes as all the pages have.
        everything = r.kv_buf.at[slot, compat.ds(0, (end - first) * page)]
        compat.make_async_copy(everything, everything, r.kv_sem.at[slot]).wait()

    # -- queries in, results out

    def copy_q(self, tile: _Tile):
        """The copy of the tile's queries into `q_buf`."""
        r, count = self.refs, self.live_tokens(tile)
        token = r.cu_q_lens[tile.row] + tile.index * tile.tokens
        return compat.make_async_copy(
            r.q.at[:, compat.ds(token, count)], r.q_buf.at[:, compat.ds(0, count)], r.q_sem
        )

    def copies_out(self, token, count):
        """The copies of `count` tokens' results from VMEM to `token` and what follows it."""
        r = self.refs
        pairs = [(r.out_buf, r.out)] + ([(r.lse_buf, r.lse)] if self.plan.return_lse else [])
        return [
            compat.make_async_copy(
                buf.at[:, compat.ds(0, count)], array.at[:, compat.ds(token, count)], r.out_sem
            )
            for buf, array in pairs
        ]

    def wait_out(self, count):
        """Wait for the results of `count` tokens, if there are any: only their size matters."""

        @compat.when(count > 0)
        def _():
            for copy in self.copies_out(0, count):
                copy.wait()

    # -- the loops

    def run(self):
        """The whole kernel."""
        r, plan = self.refs, self.plan
        if plan.writes:
            self.write_new_tokens()
        first = r.next_row[0]

        @compat.when(first < r.ranges[2])
        def _():
            self.start_tile(_Tile(first, 0, plan.tile_tokens), 0)

        # (half of kv_buf that the next block is in, tokens whose results are on their way out)
        state = (jnp.int32(0), jnp.int32(0))
        state = lax.fori_loop(
            0, r.ranges[0], lambda row, s: self.attend_tile(_Tile(row, 0, 1), s), state
        )
        state = lax.fori_loop(r.ranges[0], r.ranges[2], self.attend_chunk, state)
        self.wait_out(state[1])

    def attend_chunk(self, row, state):
        size = self.plan.tile_tokens
        num_tiles = _ceil_div(self.num_new(row), size)
        return lax.fori_loop(
            0, num_tiles, lambda i, s: self.attend_tile(_Tile(row, i, size), s), state
        )

    def start_tile(self, tile: _Tile, slot):
        """Start fetching a tile's queries and its first block.

        A row's first tile may be started without knowing whether the row has one token or more:
        with index 0 the size matters only for ends, and those are bounded by what the row has.
        """
        self.fetch_block(tile, self.blocks(tile)[0], slot)
        self.copy_q(tile).start()

    def start_after(self, tile: _Tile, slot):
        """Start the tile that comes after this one, if there is one."""
        row, index, size = tile.row, tile.index + 1, tile.tokens
        more = index * size < self.num_new(row)

        @compat.when(more)
        def _():
            self.start_tile(_Tile(row, index, size), slot)

        next_row = self.refs.next_row[row + 1]

        @compat.when(jnp.logical_not(more) & (next_row < self.refs.ranges[2]))
        def _():
            self.start_tile(_Tile(next_row, 0, self.plan.tile_tokens), slot)

    def attend_tile(self, tile: _Tile, state):
        """Attend one tile to its blocks and send its results out; returns the new state."""
        r, plan = self.refs, self.plan
        slot, in_flight = state
        rows = tile.tokens * plan.group
        self.copy_q(tile).wait()
        for head in range(plan.num_kv_heads):
            q = r.q_buf[head, : tile.tokens].reshape(rows, plan.width)
            r.q_rows[head, :rows] = q.astype(plan.compute_dtype)
        self.reset_softmax(tile)
        first, end = self.blocks(tile)

        def one_block(block, slot):
            @compat.when(block + 1 < end)
            def _():
                self.fetch_block(tile, block + 1, 1 - slot)

            @compat.when(block + 1 == end)
            def _():
                self.start_after(tile, 1 - slot)

            self.wait_block(tile, block, slot)
            self.attend_block(tile, block, slot)
            return 1 - slot

        slot = lax.fori_loop(first, end, one_block, slot)
        self.wait_out(in_flight)
        self.put_results(tile)
        count = self.live_tokens(tile)
        for copy in self.copies_out(r.cu_q_lens[tile.row] + tile.index * tile.tokens, count):
            copy.start()
        return slot, count

    # -- the arithmetic

    def reset_softmax(self, tile: _Tile):
        """Begin a softmax per query row: empty, or holding the sink, whose value is zero."""
        r, plan = self.refs, self.plan
        shape = (plan.num_kv_heads, tile.tokens * plan.group, TPU_LANES)
        rows = shape[1]
        r.acc[:, :rows] = jnp.zeros((*shape[:2], plan.width), F32)
        if not plan.has_sinks:
            r.top[:, :rows] = jnp.full(shape, NEG, F32)
            r.total[:, :rows] = jnp.zeros(shape, F32)
            return
        for head in range(plan.num_kv_heads):
            sinks = jnp.broadcast_to(r.sinks[head][None], (tile.tokens, plan.group, TPU_LANES))
            r.top[head, :rows] = sinks.reshape(rows, TPU_LANES)
        r.total[:, :rows] = jnp.ones(shape, F32)

    def mask(self, tile: _Tile, block):
        """bool[M, block]: which keys each row of the tile sees."""
        plan = self.plan
        shape = (tile.tokens * plan.group, plan.block_tokens)
        key = block * plan.block_tokens + lax.broadcasted_iota(jnp.int32, shape, 1)
        token = lax.broadcasted_iota(jnp.int32, shape, 0) // plan.group
        query = self.first_position(tile) + token
        seen = key <= query
        return seen if plan.window is None else seen & (key > query - plan.window)

    def in_range(self, tile: _Tile, block):
        """bool[block, W]: which slots any token of the tile may see; the others may hold NaN."""
        shape = (self.plan.block_tokens, self.plan.width)
        key = block * self.plan.block_tokens + lax.broadcasted_iota(jnp.int32, shape, 0)
        return (key >= self.first_key(tile)) & (key < self.end_position(tile))

    def attend_block(self, tile: _Tile, block, slot):
        """Let every head's softmax take in one block of keys and values."""
        r, plan = self.refs, self.plan
        rows = tile.tokens * plan.group
        seen, in_range = self.mask(tile, block), self.in_range(tile, block)
        dot = functools.partial(
            lax.dot_general,
            preferred_element_type=F32,
            precision=lax.Precision.HIGHEST if plan.compute_dtype == F32 else None,
        )
        load = functools.cache(functools.partial(self.load_word, slot))
        for head in range(plan.num_kv_heads):
            keys, values = self.keys_and_values(load, head)
            keys = keys.astype(plan.compute_dtype)
            # In f32: v5e has no bf16 select.
            values = jnp.where(in_range, values.astype(F32), 0.0).astype(plan.compute_dtype)
            scores = dot(r.q_rows[head, :rows], keys, (((1,), (1,)), ((), ()))) * r.k_scale[head]
            if plan.soft_cap is not None:
                scores = plan.soft_cap * jnp.tanh(scores / plan.soft_cap)
            scores = jnp.where(seen, scores, NEG)
            old_top = r.top[head, :rows]
            top = jnp.maximum(old_top, scores.max(axis=1, keepdims=True))
            # Where a row has seen nothing yet these are 1, not 0; its first key has shrink = 0.
            weights = jnp.exp(scores - top[:, :1])
            shrink = jnp.exp(old_top - top)
            r.top[head, :rows] = top
            r.total[head, :rows] = shrink * r.total[head, :rows] + weights.sum(1, keepdims=True)
            update = dot(weights.astype(plan.compute_dtype), values, (((1,), (0,)), ((), ())))
            r.acc[head, :rows] = shrink[:, :1] * r.acc[head, :rows] + update

    def put_results(self, tile: _Tile):
        """Finish the tile's softmaxes into `out_buf` and `lse_buf`."""
        r, plan = self.refs, self.plan
        rows, lead = tile.tokens * plan.group, (tile.tokens, plan.group)
        for head in range(plan.num_kv_heads):
            total = r.total[head, :rows]
            out = r.acc[head, :rows] / total[:, :1] * r.v_scale[head]
            r.out_buf[head, : tile.tokens] = out.astype(plan.q_dtype).reshape(*lead, plan.width)
            if plan.return_lse:
                lse = r.top[head, :rows] + jnp.log(total)
                r.lse_buf[head, : tile.tokens] = lse.reshape(*lead, TPU_LANES)

    # -- one head's keys and values out of a block

    def keys_and_values(self, load, head: int):
        """([block, W], [block, W]) of one head; where D = 64, the same lanes k|v twice.

        Queries are zero where the values are, so q . (k|v) = q . k; weights . (k|v) holds the output
        in its upper lanes.
        """

        def row(index):
            return load(index // self.plan.pack)[index % self.plan.pack]

        if self.plan.head_dim == 64:
            return row(head), row(head)
        if self.plan.head_dim == 128:
            return row(2 * head), row(2 * head + 1)
        pairs = [jnp.concatenate([row(4 * head + i), row(4 * head + i + 1)], 1) for i in (0, 2)]
        return pairs[0], pairs[1]

    def load_word(self, slot, word: int):
        """A row of words of every token in the block: `pack` arrays [block, 128], f32 or bf16."""
        buf, plan = self.refs.kv_buf, self.plan
        size = plan.block_tokens
        if plan.interpreted:  # the interpreter cannot reshape or bitcast a reference
            value = buf[slot, :, word]
            bits = value if plan.pack == 1 else compat.bitcast(value, jnp.uint32)
            bits = bits.reshape(size, TPU_LANES)
        else:  # one load with a stride over sublanes
            as_bits = buf if plan.pack == 1 else buf.bitcast(jnp.uint32)
            bits = as_bits.at[slot].reshape(size * plan.words, TPU_LANES)[word :: plan.words, :]
        return [bits] if plan.pack == 1 else _unpack(bits, plan.kv_dtype)


def _unpack(bits, dtype):
    """u32[n, 128] of packed elements -> the rows of elements, first in the low bits; bf16 or f32."""
    if dtype == jnp.bfloat16:  # a bf16 is the upper half of an f32
        low, high = bits << jnp.uint32(16), bits & jnp.uint32(0xFFFF0000)
        return [compat.bitcast(low, F32), compat.bitcast(high, F32)]
    bytes_ = [(bits >> jnp.uint32(8 * i)).astype(jnp.uint8) for i in range(4)]
    return [compat.bitcast(b, dtype).astype(jnp.bfloat16) for b in bytes_]


def _ceil_div(x, y: int):
    return (x + (y - 1)) // y


def run_kernel(*refs, names: tuple[str, ...], plan: Plan) -> None:
    """The function that Pallas traces: `names` tells which field of `Refs` each argument is."""
    _Kernel(Refs(**dict(zip(names, refs, strict=True))), plan).run()
