"""Rows with one token on Hopper: split-KV paged decode, and the merge of the splits.

Called by `gpu`. Two kernels, and a work list between the batch and them:

    work_list     (`gpu_plan`, in jnp) the live splits of each row, in order of position
    decode kernel a fixed number of CTAs share out (split, head) pairs; each gives one partial result
    merge kernel  one CTA for each (row, head) merges the row's partials in order of position

Each split starts from scratch, and the merge takes them in order: since a row's splits are a property
of that row, so is its result.

Invariant: a row's result is the same to the bit whatever its neighbours, the bucket and the width
of the page table.

The decode kernel computes S^T = K Q^T and O^T = V^T P: wgmma's M, at least 64, is then a page or
head_dim, and its N the query rows of one KV head, 8 of them in most models. One warpgroup loads, one
computes. Source: partial results merged by their log-sum-exp, "Flash-Decoding", Dao et al. 2023.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.ragged_paged_attention.gpu_blocks import (
    BF16,
    BF16_TILES,
    BYTE_ROWS,
    F32,
    I32,
    LOG2E,
    MASKED,
    PAGE,
    PER_COLUMN,
    ROWS,
    full,
    matmul,
    store,
    tanh,
)
from pallas_kernels.ragged_paged_attention.gpu_plan import DecodePlan, Item, buffers, work_list

MERGE_STAGES = 4  # partials on their way


def decode_rows(
    q,
    pool,
    kv_lens,
    page_table,
    kv_starts,
    num_live,
    score_scale,
    v_scale,
    sinks,
    *,
    plan,
    interpret,
):
    """Attention of the first `num_live` rows, one token each, to the pages of the row.

    Args:
        q: [R, H, D] bf16.
        pool: [N, K, 2, page, D]. page_table: i32[R, P]. kv_lens, kv_starts: i32[R].
        num_live: i32[].
        score_scale: f32[K], factor on the product of a query and a key as the pool holds it.
        v_scale: f32[K], factor on the values.
        sinks: f32[H] or None.
        plan: a DecodePlan. interpret: as plgpu.kernel's.

    Returns:
        (out [R, H, D] bf16, lse f32[R, H]); rows that are not live hold anything.
    """
    num_rows, num_heads, head_dim = q.shape
    kv_heads, lanes = plan.num_kv_heads, plan.passes * plan.columns
    extra = (0, lanes - plan.group)
    shape = (num_rows, kv_heads, plan.group, head_dim)
    q = jnp.pad(q.reshape(shape), ((0, 0), (0, 0), extra, (0, 0)))
    q = q.reshape(num_rows, plan.heads, plan.columns, head_dim)
    work = work_list(plan, kv_lens, kv_starts, num_live, page_table.shape[1])
    partials = _decode(q, pool, page_table, work, score_scale, plan, interpret)
    if sinks is not None:
        sinks = jnp.maximum(sinks * LOG2E, MASKED).reshape(kv_heads, plan.group)
        sinks = jnp.pad(sinks, ((0, 0), extra)).reshape(plan.heads, plan.columns)
    out, lse = _merge(partials, work.row_items, v_scale, sinks, plan, interpret)
    out = out.reshape(num_rows, kv_heads, lanes, head_dim)[:, :, : plan.group]
    lse = lse.reshape(num_rows, kv_heads, lanes)[:, :, : plan.group]
    return out.reshape(num_rows, num_heads, head_dim), lse.reshape(num_rows, num_heads)


# -- the decode kernel


def _scratch(plan: DecodePlan) -> dict[str, Any]:
    """Buffers and barriers of the decode kernel, by their names in `_Decode`."""
    barrier, stages = compat.Barrier, plan.stages
    scratch = {
        name: compat.SMEM(shape, dtype, transforms=transforms)
        for name, (shape, dtype, transforms) in buffers(plan, stages).items()
    }
    return scratch | {
        "q_full": barrier(num_barriers=2),
        "q_empty": barrier(num_barriers=2),
        "full": barrier(num_arrivals=2, num_barriers=stages),  # keys and values
        "empty": barrier(num_barriers=stages),
    }


def _decode(q, pool, page_table, work, score_scale, plan, interpret):
    """(accumulated f32[W, heads, D, columns], (top, total) f32[W, heads, 2, columns]) of each item."""
    shape = (work.items.shape[1], plan.heads)
    acc = jax.ShapeDtypeStruct((*shape, plan.head_dim, plan.columns), F32)
    sums = jax.ShapeDtypeStruct((*shape, 2, plan.columns), F32)

    def paged_decode(*refs, **scratch):
        body = _Decode(*refs, **scratch, plan=plan)
        group = lax.axis_index("warpgroup")
        compat.when(group == 0)(body.load)
        compat.when(group == 1)(body.compute)

    return compat.gpu_kernel(
        paged_decode,
        out_type=(acc, sums),
        grid=(plan.num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=compat.GpuCompilerParams(approx_math=True),
        scratch_types=_scratch(plan),
    )(q, pool, page_table, work.items, work.row_items, score_scale)


@dataclasses.dataclass(frozen=True)
class _Decode:
    """The refs of the decode kernel, and what each of its two warpgroups does with them.

    A CTA takes every num_ctas-th unit, a (item, head) pair. Queries and pages go through rings of
    buffers that run on from one unit to the next: `full` says that one is loaded, `empty` that it
    may be overwritten.
    """

    q: Any  # [R, heads, columns, D]
    pool: Any  # [N, K, 2, page, D]
    page_table: Any  # i32[R, P]
    items: Any  # i32[5, W]
    row_items: Any  # i32[R+1]
    score_scale: Any  # f32[K]
    acc: Any  # f32[W, heads, D, columns]
    sums: Any  # f32[W, heads, 2, columns]
    q_buf: Any
    kv_buf: Any
    p_buf: Any
    acc_buf: Any
    sums_buf: Any
    q_full: Any
    q_empty: Any
    full: Any
    empty: Any
    plan: DecodePlan
    wide_buf: Any = None

    def num_units(self):
        """How many units fall to this CTA."""
        ctas = self.plan.num_ctas
        units = self.row_items[self.row_items.shape[0] - 1] * self.plan.heads
        return lax.div(units - lax.axis_index("cta") + I32(ctas - 1), I32(ctas))

    def unit(self, i):
        """(index of the item, the item, head) of this CTA's i-th unit."""
        unit = lax.axis_index("cta") + i * self.plan.num_ctas
        w = lax.div(unit, I32(self.plan.heads))
        item = Item(*(self.items[field, w] for field in range(len(Item._fields))))
        return w, item, lax.rem(unit, I32(self.plan.heads))

    def kv_head(self, head):
        return lax.div(head, I32(self.plan.passes))

    # -- the warpgroup that loads

    def load(self):
        """Start the copies of every unit's queries and pages, as buffers become free."""
        num_units = self.num_units()

        def unit(i, taken):
            _, item, head = self.unit(i)
            slot = lax.rem(i, I32(2))
            compat.when(i >= 2)(lambda: compat.barrier_wait(self.q_empty.at[slot]))
            queries = self.q.at[item.row, head]
            compat.copy_gmem_to_smem(queries, self.q_buf.at[slot], self.q_full.at[slot])
            page = functools.partial(self.load_page, item, self.kv_head(head), taken)
            lax.fori_loop(item.first_page, item.end_page, page, None)
            return taken + item.end_page - item.first_page

        taken = lax.fori_loop(I32(0), num_units, unit, I32(0))
        # A barrier may not be left with an arrival that nobody has seen.
        for ring, size, used in (
            (self.q_empty, 2, num_units),
            (self.empty, self.plan.stages, taken),
        ):
            for slot in range(size):
                compat.when(slot < used)(functools.partial(compat.barrier_wait, ring.at[slot]))

    def load_page(self, item, kv_head, taken, page, _):
        page_id = self.page_table[item.row, page]
        slot = self.free_slot(taken + page - item.first_page)
        for part in (0, 1):  # in one copy they would have too many dimensions at head_dim 128
            source, target = self.pool.at[page_id, kv_head, part], self.kv_buf.at[slot, part]
            compat.copy_gmem_to_smem(source, target, self.full.at[slot])

    def free_slot(self, n):
        """Where this CTA's n-th page goes, once nobody reads there."""
        slot = lax.rem(n, I32(self.plan.stages))
        compat.when(n >= self.plan.stages)(lambda: compat.barrier_wait(self.empty.at[slot]))
        return slot

    # -- the warpgroup that computes

    def compute(self):
        """Online softmax over the pages of each unit."""
        plan = self.plan
        shape = (plan.head_dim, plan.columns)

        def unit(i, taken):
            w, item, head = self.unit(i)
            scale = self.score_scale[self.kv_head(head)]
            slot = lax.rem(i, I32(2))
            compat.barrier_wait(self.q_full.at[slot])
            start = (
                full(shape, 0.0, ROWS),
                full(shape[1:], MASKED, PER_COLUMN),
                full(shape[1:], 0.0, PER_COLUMN),
            )
            step = functools.partial(self.step, item, slot, scale, taken)
            state = lax.fori_loop(item.first_page, item.end_page, step, start)
            compat.barrier_arrive(self.q_empty.at[slot])
            self.save(w, head, state)
            return taken + item.end_page - item.first_page

        lax.fori_loop(I32(0), self.num_units(), unit, I32(0))
        compat.wait_smem_to_gmem(0)

    def step(self, item, q_slot, scale, taken, page, state):
        """One page more: (accumulated, top, total) -> the same; scores in units of log 2."""
        acc, top, total = state
        slot = self.full_slot(taken + page - item.first_page)
        keys, values = self.keys_and_values(slot)
        begin, end = item.first_slot - page * PAGE, item.end_slot - page * PAGE
        self.clear_unseen(values, begin, end)
        scores = self.scores(keys, q_slot, scale)
        place = compat.gpu_iota(I32, scores.shape, 0, layout=ROWS)
        scores = jnp.where((place >= begin) & (place < end), scores, F32(MASKED))
        new_top = jnp.maximum(top, scores.max(axis=0))
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [1]))
        store(self.p_buf.T, weights.astype(BF16))
        kept = jnp.exp2(top - new_top)
        acc = acc * lax.broadcast_in_dim(kept, acc.shape, [1]) + matmul(values.T, self.p_buf.T)
        if not self.plan.is_8bit:
            compat.barrier_arrive(self.empty.at[slot])
        return acc, new_top, total * kept + weights.sum(axis=0)

    def full_slot(self, n):
        """Where this CTA's n-th page is, once it is there."""
        slot = lax.rem(n, I32(self.plan.stages))
        compat.barrier_wait(self.full.at[slot])
        return slot

    def keys_and_values(self, slot):
        """Refs [page, D] bf16 of a page; an 8-bit one is widened, and its buffer given back."""
        if not self.plan.is_8bit:
            return self.kv_buf.at[slot, 0], self.kv_buf.at[slot, 1]
        pieces = self.plan.head_dim // 64

        @compat.loop(0, 2 * pieces)  # little at a time: few registers
        def _(i):
            left = compat.multiple_of(lax.rem(i, I32(pieces)) * 64, 64)
            part, lanes = lax.div(i, I32(pieces)), compat.ds(left, 64)
            x = compat.layout_cast(self.kv_buf[slot, part, :, lanes], BYTE_ROWS)
            # The hardware converts 8-bit floats to f16 only; every one of them is exact there.
            x = x if jnp.issubdtype(x.dtype, jnp.integer) else x.astype(jnp.float16)
            self.wide_buf[part, :, lanes] = x.astype(BF16)

        compat.commit_smem()
        compat.barrier_arrive(self.empty.at[slot])
        return self.wide_buf.at[0], self.wide_buf.at[1]

    def clear_unseen(self, values, begin, end):
        """Zero the values that the token does not see: a weight of 0 times NaN would be NaN."""

        @compat.when((begin > 0) | (end < PAGE))
        def _():
            @compat.loop(0, PAGE // 8)
            def _(i):
                rows = compat.ds(compat.multiple_of(i * 8, 8), 8)
                for left in range(0, self.plan.head_dim, 64):  # little at a time: few registers
                    piece = values.at[rows, compat.ds(left, 64)].T
                    x = piece[...]
                    place = i * 8 + compat.gpu_iota(I32, x.shape, 1, layout=ROWS)
                    piece[...] = jnp.where((place >= begin) & (place < end), x, BF16(0))

            compat.commit_smem()

    def scores(self, keys, q_slot, scale):
        """f32[page, columns], in units of log 2."""
        cap = self.plan.soft_cap
        scores = matmul(keys, self.q_buf.at[q_slot].T) * scale
        return scores * LOG2E if cap is None else tanh(scores / cap) * (cap * LOG2E)

    def save(self, w, head, state):
        acc, top, total = state
        compat.wait_smem_to_gmem(0)  # of the unit before
        self.acc_buf[...] = acc
        self.sums_buf[0] = top
        self.sums_buf[1] = total
        compat.commit_smem()
        compat.copy_smem_to_gmem(self.acc_buf, self.acc.at[w, head])
        compat.copy_smem_to_gmem(self.sums_buf, self.sums.at[w, head])


# -- the merge kernel


def _merge(partials, row_items, v_scale, sinks, plan, interpret):
    """(out [R, heads, columns, D] bf16, lse f32[R, heads, columns]) from the partials of `_decode`."""
    acc, sums = partials
    num_rows = row_items.shape[0] - 1
    shape = (num_rows, plan.heads, plan.columns)
    smem, barrier = compat.SMEM, compat.Barrier

    def merge_splits(*refs, **scratch):
        body = _Merge(*refs, **scratch, plan=plan)
        row = lax.axis_index("row")
        first, end = body.row_items[row], body.row_items[row + 1]
        compat.when(end > first)(functools.partial(body.merge, first, end))

    if sinks is None:
        sinks = jnp.full((plan.heads, plan.columns), MASKED, F32)
    return compat.gpu_kernel(
        merge_splits,
        out_type=(
            jax.ShapeDtypeStruct((*shape, plan.head_dim), BF16),
            jax.ShapeDtypeStruct(shape, F32),
        ),
        grid=(num_rows, plan.heads),
        grid_names=("row", "head"),
        interpret=interpret,
        compiler_params=compat.GpuCompilerParams(approx_math=True),
        scratch_types={
            "acc_buf": smem((MERGE_STAGES, plan.head_dim, plan.columns), F32),
            "sums_buf": smem((MERGE_STAGES, 2, plan.columns), F32),
            "sink_buf": smem((plan.columns,), F32),
            "out_buf": smem((plan.columns, plan.head_dim), BF16, transforms=BF16_TILES),
            "lse_buf": smem((plan.columns,), F32),
            "full": barrier(num_arrivals=2, num_barriers=MERGE_STAGES),
            "sink_full": barrier(),
        },
    )(acc, sums, row_items, v_scale, sinks)


@dataclasses.dataclass(frozen=True)
class _Merge:
    """The refs of the merge kernel, and what it does with them."""

    acc: Any  # f32[W, heads, D, columns]
    sums: Any  # f32[W, heads, 2, columns]
    row_items: Any  # i32[R+1]
    v_scale: Any  # f32[K]
    sinks: Any  # f32[heads, columns], in units of log 2
    out: Any  # [R, heads, columns, D] bf16
    lse: Any  # f32[R, heads, columns]
    acc_buf: Any
    sums_buf: Any
    sink_buf: Any
    out_buf: Any
    lse_buf: Any
    full: Any
    sink_full: Any
    plan: DecodePlan

    def load(self, item, first):
        """Start the copies of an item's partial into the slot of its turn."""
        slot = lax.rem(item - first, I32(MERGE_STAGES))
        # Not the default mode, zeros: that asks for a tiled copy, which wants its target at a multiple
        # of 128 bytes, and the sums of 8 columns take 64. A bulk copy wants 16.
        mode = compat.OOBFillMode.UNDEFINED
        for source, target in ((self.acc, self.acc_buf), (self.sums, self.sums_buf)):
            partial = source.at[item, lax.axis_index("head")]
            buffer, landed = target.at[slot], self.full.at[slot]
            compat.copy_gmem_to_smem(partial, buffer, landed, oob_mode=mode)

    def full_slot(self, n):
        """Where the n-th partial is, once it is there."""
        slot = lax.rem(n, I32(MERGE_STAGES))
        compat.barrier_wait(self.full.at[slot])
        return slot

    def merge(self, first, end):
        """Merge items [first, end) in order; the sink, if any, comes before them."""
        head = lax.axis_index("head")
        compat.copy_gmem_to_smem(self.sinks.at[head], self.sink_buf, self.sink_full)
        ahead = jnp.minimum(first + MERGE_STAGES, end)
        lax.fori_loop(first, ahead, lambda item, _: self.load(item, first), None)
        compat.barrier_wait(self.sink_full)
        sink = compat.layout_cast(self.sink_buf[...], PER_COLUMN)

        def step(item, state):
            acc, top, total = state
            slot = self.full_slot(item - first)
            more = compat.layout_cast(self.acc_buf[slot], ROWS)
            its_top = compat.layout_cast(self.sums_buf[slot, 0], PER_COLUMN)
            its_total = compat.layout_cast(self.sums_buf[slot, 1], PER_COLUMN)
            compat.commit_smem()  # all have read it
            ahead = item + MERGE_STAGES
            compat.when(ahead < end)(lambda: self.load(ahead, first))
            new_top = jnp.maximum(top, its_top)
            kept, scaled = jnp.exp2(top - new_top), jnp.exp2(its_top - new_top)
            acc = acc * lax.broadcast_in_dim(kept, acc.shape, [1])
            acc += more * lax.broadcast_in_dim(scaled, acc.shape, [1])
            return acc, new_top, total * kept + its_total * scaled

        has_sink = jnp.where(sink > F32(MASKED), F32(1), F32(0))
        start = (full(self.acc_buf.shape[1:], 0.0, ROWS), sink, has_sink)
        acc, top, total = lax.fori_loop(first, end, step, start)
        self.save(acc, top, total)

    def save(self, acc, top, total):
        head = lax.axis_index("head")
        v_scale = self.v_scale[lax.div(head, I32(self.plan.passes))]
        out = acc * lax.broadcast_in_dim(v_scale / total, acc.shape, [1])
        self.out_buf.T[...] = out.astype(BF16)
        self.lse_buf[...] = (top + jnp.log2(total)) * F32(1 / LOG2E)
        compat.commit_smem()
        place = lax.axis_index("row"), head
        compat.copy_smem_to_gmem(self.out_buf, self.out.at[place])
        compat.copy_smem_to_gmem(self.lse_buf, self.lse.at[place])
        compat.wait_smem_to_gmem(0)
