"""How rows with one token are cut into splits on Hopper, and what their kernels are compiled for.

Called by `gpu` and `gpu_decode`. A row is cut at absolute positions, multiples of SPLIT_PAGES pages.
Rows that see more than MAX_SPLITS of them are cut at multiples of twice, four times .. as many, which
bounds the partial results.

Invariant: a row's splits are a property of that row alone, not of its neighbours, the bucket or the
width of the page table; what is not live (padded rows, pages beyond a row or before its window) is
in none of them.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.gpu_blocks import (
    BF16,
    BF16_TILES,
    BYTE_TILES,
    F32,
    PAGE,
)

SPLIT_PAGES = 8  # 512 tokens
MAX_SPLITS = 32  # of a row; with 8 KV heads enough for every multiprocessor
MAX_STAGES = 3  # pages on their way to a CTA
NUM_MULTIPROCESSORS = 132  # of an H100 or H200; with fewer of them some CTAs wait for others
SMEM_BYTES = 228 * 1024  # of a multiprocessor
SMEM_BYTES_PER_CTA = 227 * 1024  # the most that one may have; 1 KiB more of it is the driver's
REDUCTION_BYTES = 2048  # what the compiler takes for reductions across warps
MAX_COLUMNS = 32  # query rows of a pass: 64 would take 255 registers at head_dim 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """What is compiled for a call.

    Args:
        num_kv_heads: K. group: query heads that share one. head_dim: D.
        kv_dtype: element type of the pool.
        window, soft_cap: as in `api.ragged_paged_attention`.
        split_pages: pages in a split, of rows that see at most MAX_SPLITS such.
        interpreted: whether it runs in the interpreter, where every CTA costs time.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    kv_dtype: Any
    window: int | None
    soft_cap: float | None
    split_pages: int
    interpreted: bool

    @property
    def columns(self) -> int:
        """Query rows in one pass over a KV head: 8, 16 or 32."""
        return next((n for n in (8, 16) if n >= self.group), MAX_COLUMNS)

    @property
    def passes(self) -> int:
        """Passes over a KV head; more than one only where the group is beyond MAX_COLUMNS."""
        return -(-self.group // self.columns)

    @property
    def heads(self) -> int:
        """(KV head, pass) pairs."""
        return self.num_kv_heads * self.passes

    @property
    def is_8bit(self) -> bool:
        """Whether pages are widened to bf16 in shared memory."""
        return self.kv_dtype.itemsize == 1

    @property
    def ctas_per_multiprocessor(self) -> int:
        """2, but 1 where the registers (32 columns) or the pages (head_dim 256) do not let two in."""
        return 2 if self.columns < MAX_COLUMNS and self.head_dim <= 128 else 1

    @property
    def num_ctas(self) -> int:
        """CTAs of the decode kernel."""
        return 2 if self.interpreted else NUM_MULTIPROCESSORS * self.ctas_per_multiprocessor

    @property
    def stages(self) -> int:
        """Pages on their way: MAX_STAGES, or fewer where they do not fit."""
        ctas = self.ctas_per_multiprocessor
        limit = min(SMEM_BYTES_PER_CTA, SMEM_BYTES // ctas - 1024)
        return next(n for n in range(MAX_STAGES, 0, -1) if smem_bytes(self, n) <= limit)


def buffers(plan: DecodePlan, stages: int) -> dict[str, tuple[tuple[int, ...], Any, tuple]]:
    """Shape, dtype and transforms of the buffers in shared memory, by their names in `_Decode`."""
    columns, head_dim = plan.columns, plan.head_dim
    tiles = BYTE_TILES if plan.is_8bit else BF16_TILES
    buffers = {
        "q_buf": ((2, columns, head_dim), BF16, BF16_TILES),
        "kv_buf": ((stages, 2, PAGE, head_dim), plan.kv_dtype, tiles),
        "p_buf": ((columns, PAGE), BF16, BF16_TILES),
        "acc_buf": ((head_dim, columns), F32, ()),
        "sums_buf": ((2, columns), F32, ()),
    }
    if plan.is_8bit:
        buffers["wide_buf"] = ((2, PAGE, head_dim), BF16, BF16_TILES)
    return buffers


def smem_bytes(plan: DecodePlan, stages: int) -> int:
    """Shared memory of a CTA of the decode kernel: its buffers, each a multiple of 1 KiB, 8 bytes a
    barrier, and the compiler's own."""
    sizes = (
        math.prod(shape) * jnp.dtype(dtype).itemsize
        for shape, dtype, _ in buffers(plan, stages).values()
    )
    return sum(-(-size // 1024) * 1024 for size in sizes) + 8 * (4 + 2 * stages) + REDUCTION_BYTES


class Item(NamedTuple):
    """One split of one row; pages and slots count from the start of the row's page table."""

    row: jax.Array  # i32 [W], or a scalar in the kernel; and so the others
    first_page: jax.Array
    end_page: jax.Array
    first_slot: jax.Array  # first position that the row's token sees
    end_slot: jax.Array  # one past the last


class WorkList(NamedTuple):
    """The live splits of all rows, row after row, each in order of position."""

    items: jax.Array  # i32[5, W] the fields of Item
    row_items: jax.Array  # i32[R+1] where each row's items begin; the last is their number


def num_items(plan: DecodePlan, num_rows: int, pages_per_row: int) -> int:
    """W: the most splits that `num_rows` rows of `pages_per_row` pages can have."""
    pages = pages_per_row
    if plan.window is not None:
        pages = min(pages, (plan.window + PAGE - 2) // PAGE + 1)
    # A run of n pages that starts anywhere touches at most this many splits.
    return num_rows * min(MAX_SPLITS + 1, (pages + 2 * plan.split_pages - 2) // plan.split_pages)


def partial_bytes(plan: DecodePlan, num_rows: int, pages_per_row: int) -> int:
    """Bytes of the partial results: for each item and head D + 2 f32 for each query row.

    256 rows, 128 pages a row (8192 tokens), 8 heads of 128, 8 query rows: 144,834,560. It stops
    growing at MAX_SPLITS + 1 splits a row: 281,149,440, whatever the context.
    """
    values = 4 * plan.columns * (plan.head_dim + 2)
    return num_items(plan, num_rows, pages_per_row) * plan.heads * values


def work_list(plan: DecodePlan, kv_lens, kv_starts, num_live, pages_per_row: int) -> WorkList:
    """The live splits of rows with one token each.

    Args:
        kv_lens, kv_starts: i32[R], as in `api.ragged_paged_attention`.
        num_live: i32[], the first rows, which are to be computed.
        pages_per_row: P.
    """
    num_rows = kv_lens.shape[0]
    begin = kv_starts if plan.window is None else jnp.maximum(kv_starts, kv_lens - plan.window)
    # Twice as large splits for each doubling of the row beyond MAX_SPLITS of the smallest.
    limits, limit = [], MAX_SPLITS * plan.split_pages * PAGE
    while limit < pages_per_row * PAGE:
        limits.append(limit)
        limit *= 2
    longer = (kv_lens - begin)[:, None] > jnp.asarray(limits, jnp.int32)[None]
    pages = plan.split_pages << jnp.sum(longer, axis=1, dtype=jnp.int32)  # i32[R] in a split
    first = begin // PAGE // pages
    counts = (kv_lens - 1) // PAGE // pages - first + 1
    counts = jnp.where(jnp.arange(num_rows, dtype=jnp.int32) < num_live, counts, 0)
    row_items = jnp.append(jnp.zeros((1,), jnp.int32), jnp.cumsum(counts, dtype=jnp.int32))

    item = jnp.arange(num_items(plan, num_rows, pages_per_row), dtype=jnp.int32)
    row = jnp.sum(row_items[None, 1:] <= item[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, num_rows - 1)  # beyond the last item it means nothing
    split = first[row] + item - row_items[row]
    table_page = (kv_starts // PAGE)[row]
    first_page = jnp.maximum(split * pages[row], begin[row] // PAGE)
    end_page = jnp.minimum((split + 1) * pages[row], (kv_lens[row] + PAGE - 1) // PAGE)
    items = Item(
        row=row,
        first_page=first_page - table_page,
        end_page=end_page - table_page,
        first_slot=(begin - kv_starts)[row],
        end_slot=(kv_lens - kv_starts)[row],
    )
    return WorkList(jnp.stack(items), row_items)
