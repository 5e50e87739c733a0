"""Ragged paged attention for Hopper: Mosaic GPU kernels over pages of 64 tokens.

Called by `api`. Three steps, each a module: `gpu_write` puts the new tokens into their pages,
`gpu_decode` serves the rows with one token, `gpu_chunks` the rows with several. This module puts
their results together. Compiled for sm_90a and run in Pallas' interpreter; it has not run on hardware,
and sizes are reasoned, not tuned.

Everything is done for each KV head by itself, so heads may be sharded.

Invariant: dtypes, layouts, page and head sizes have been looked at in `dispatch`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.ragged_paged_attention import gpu_decode, gpu_plan, layout
from pallas_kernels.ragged_paged_attention.gpu_blocks import F32, PAGE
from pallas_kernels.ragged_paged_attention.gpu_chunks import attend_chunks
from pallas_kernels.ragged_paged_attention.gpu_plan import DecodePlan
from pallas_kernels.ragged_paged_attention.gpu_write import write_tokens


def attend(q, k_new, v_new, kv, rows, scales, sinks, *, options, blocks, interpret):
    """See `api.ragged_paged_attention`.

    `blocks` is (pages in a split of a row with one token,); another one rounds otherwise. `interpret`
    is None or False for the device, True or `compat.GpuInterpretParams` for Pallas' interpreter.
    """
    interpret = compat.interpreter(interpret, compat.GpuInterpretParams)
    plan = make_plan(
        q,
        kv,
        window=options.window,
        soft_cap=options.soft_cap,
        blocks=blocks,
        interpreted=bool(interpret),
    )
    new = None
    if k_new is not None:
        k = layout.encode(k_new, kv.dtype, scales.k)
        v = layout.encode(v_new, kv.dtype, scales.v)
        new = jnp.stack([k, v], axis=2)  # [T, K, 2, D]
    out, pool, lse = _attend(
        q,
        new,
        kv.data[0],
        rows,
        scales,
        sinks,
        sm_scale=options.sm_scale,
        plan=plan,
        interpret=interpret,
    )
    return out, dataclasses.replace(kv, data=(pool,)), lse if options.return_lse else None


def make_plan(q, kv, *, window=None, soft_cap=None, blocks=None, interpreted=False) -> DecodePlan:
    """What to compile for the rows with one token.

    Args:
        q: [T, H, D], abstract or not. kv: the pool, abstract or not.
        window, soft_cap, blocks: as `attend`'s.
        interpreted: whether it runs in the interpreter.

    Raises:
        ValueError: blocks that are none.
    """
    blocks = (gpu_plan.SPLIT_PAGES,) if blocks is None else blocks
    if len(blocks) != 1 or not isinstance(blocks[0], int) or blocks[0] < 1:
        raise ValueError(f"blocks={blocks!r}: expected (pages in a split,)")
    return DecodePlan(
        num_kv_heads=kv.num_kv_heads,
        group=q.shape[1] // kv.num_kv_heads,
        head_dim=kv.head_dim,
        kv_dtype=jnp.dtype(kv.dtype),
        window=window,
        soft_cap=soft_cap,
        split_pages=blocks[0],
        interpreted=interpreted,
    )


# A jit of its own: an unrolled model traces and lowers it once, not once per layer.
@functools.partial(jax.jit, static_argnames=("sm_scale", "plan", "interpret"))
def _attend(q, new, pool, rows, scales, sinks, *, sm_scale, plan, interpret):
    """(out [T, H, D], the pool's array, lse f32[T, H])."""
    num_tokens, num_rows = q.shape[0], rows.kv_lens.shape[0]
    if new is not None:
        slots = layout.token_slots(num_tokens, PAGE, rows)
        pool = write_tokens(pool, new, *slots, rows.cu_q_lens[-1:], interpret=interpret)
    table = rows.page_table.reshape(num_rows, -1)
    single = min(num_rows, num_tokens)  # the most rows with one token; row r's is token r
    ones = jnp.ones((plan.num_kv_heads,), F32)
    out, lse = gpu_decode.decode_rows(
        q[:single],
        pool,
        rows.kv_lens[:single],
        table[:single],
        rows.kv_starts[:single],
        rows.ranges[0],
        (ones if scales.k is None else scales.k) * sm_scale,
        ones if scales.v is None else scales.v,
        sinks,
        plan=plan,
        interpret=interpret,
    )
    # With one token no row has several, and `ranges` counts the one there may be as single.
    if num_tokens > 1:
        chunks = attend_chunks(
            q,
            pool,
            rows,
            scales,
            sinks,
            sm_scale=sm_scale,
            window=plan.window,
            soft_cap=plan.soft_cap,
            interpret=interpret,
        )
        both = ((out, chunks[0]), (lse, chunks[1]))
        out, lse = (_choose(rows.ranges[0], *pair) for pair in both)
    padding = jnp.arange(num_tokens, dtype=jnp.int32) >= rows.cu_q_lens[-1]  # undefined until here
    out = jnp.where(padding[:, None, None], jnp.zeros_like(out), out)
    return out, pool, jnp.where(padding[:, None], 0.0, lse)


def _choose(num_single, single, chunks):
    """[T, ..]: the first `num_single` tokens of `single` [R, ..], the others of `chunks` [T, ..]."""
    rows = [(0, len(chunks) - len(single))] + [(0, 0)] * (chunks.ndim - 1)
    token = jnp.arange(len(chunks), dtype=jnp.int32).reshape(-1, *[1] * (chunks.ndim - 1))
    return jnp.where(token < num_single, jnp.pad(single, rows), chunks)
