"""Attention of rows with several new tokens over paged keys and values: Pallas Mosaic GPU, Hopper.

Called by `gpu` for the rows that bring more than one token; their keys and values are in the pages
already. The kernel itself is `gpu_chunks_kernel`; this module makes its list of tiles, packs queries
and unpacks results. Compiled for sm_90a and run in Pallas' interpreter; it has not run on hardware,
and tile and stage counts are reasoned, not tuned.

Invariant: dtypes, page size and head_dim have been looked at in `dispatch`; any number of heads is
served.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.ragged_paged_attention import layout
from pallas_kernels.ragged_paged_attention.call import Rows, Scales
from pallas_kernels.ragged_paged_attention.gpu_blocks import (
    BF16,
    BF16_TILES,
    BYTE_TILES,
    F32,
    I32,
    LOG2E,
    PAGE,
)
from pallas_kernels.ragged_paged_attention.gpu_chunks_kernel import (
    NUM_COMPUTE,
    WG_ROWS,
    Plan,
    Refs,
    run_kernel,
)


def attend_chunks(
    q, pool, rows: Rows, scales: Scales, sinks, *, sm_scale, window, soft_cap, interpret
):
    """Attention of the tokens of rows [ranges[0], ranges[2]); other tokens' results are undefined.

    Args:
        q: bf16[T, H, D].
        pool: bf16, int8, float8_e4m3fn or float8_e5m2 [N, K, 2, 64, D]; holds the new tokens already.
        rows: where each row stands.
        scales: of an 8-bit pool.
        sinks: f32[H] or None.
        sm_scale, window, soft_cap: as `api.ragged_paged_attention`'s.
        interpret: None for the device, or `compat.GpuInterpretParams`.

    Returns:
        (out bf16[T, H, D], lse f32[T, H]).
    """
    plan = make_plan(
        q,
        pool,
        rows.kv_lens.shape[0],
        window=window,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
        interpreted=bool(interpret),
    )
    return _attend(q, pool, rows, scales, sinks, sm_scale=sm_scale, plan=plan, interpret=interpret)


def make_plan(q, pool, num_rows: int, **options) -> Plan:
    """What to compile for a call.

    Args:
        q: [T, H, D], abstract or not. pool: [N, K, 2, 64, D], likewise.
        num_rows: S.
        options: the other fields of `Plan`.
    """
    num_tokens, num_heads, head_dim = q.shape
    plan = Plan(
        num_kv_heads=pool.shape[1],
        group=num_heads // pool.shape[1],
        head_dim=head_dim,
        kv_dtype=pool.dtype,
        **options,
    )
    # Every row with tokens may have a last tile of one token.
    rows = min(num_rows, num_tokens)
    size = plan.tile_tokens
    return dataclasses.replace(plan, num_tiles=(num_tokens + rows * (size - 1)) // size)


# A jit of its own: an unrolled model traces and lowers it once, not once per layer.
@functools.partial(jax.jit, static_argnames=("sm_scale", "plan", "interpret"))
def _attend(q, pool, rows, scales, sinks, *, sm_scale, plan, interpret):
    """(out, lse) of `attend_chunks`."""
    num_tokens, head_dim = q.shape[0], q.shape[2]
    kv_lens = rows.kv_lens - rows.kv_starts  # from here on from a row's first page
    work = _make_work(plan, num_tokens, kv_lens, rows.cu_q_lens, rows.ranges)
    packed = _split(plan, q)[work.source].swapaxes(0, 1)  # [heads, places, rows of a token, D]
    packed = packed.reshape(plan.heads, -1, head_dim)
    inputs = {
        # A warpgroup reads all its rows, though the last tile may not have them.
        "q": jnp.pad(packed, ((0, 0), (0, plan.tile_rows), (0, 0))),
        "pool": pool,
        "table": rows.page_table.reshape(kv_lens.shape[0], -1),
        "tiles": work.tiles,
        "num_tiles": work.num_tiles,
        "scales": _scales(plan, sm_scale, scales),
    }
    if sinks is not None:
        head_row = jnp.arange(plan.tile_rows, dtype=I32) % plan.token_rows
        inputs["sinks"] = _split(plan, sinks[None])[0][:, head_row] * F32(LOG2E)
    out, lse = _call(plan, interpret, inputs)
    out = out[:, : packed.shape[1]].reshape(plan.heads, -1, plan.token_rows, head_dim)
    out = out[:, work.target].swapaxes(0, 1)  # [T, heads, rows of a token, D]
    head_row = work.tile_row[:, None] + jnp.arange(plan.token_rows, dtype=I32)[None]
    lse = lse[:, work.tile[:, None], head_row].swapaxes(0, 1)  # [T, heads, rows of a token]
    return _join(plan, out), _join(plan, lse)


def _split(plan: Plan, x):
    """[T, H, ..] -> [T, heads, rows of a token, ..]: as the plan cuts and pads the heads."""
    rest = x.shape[2:]
    x = x.reshape(x.shape[0], plan.num_kv_heads, plan.group, *rest)
    extra = plan.passes * plan.token_rows - plan.group
    x = jnp.pad(x, [(0, 0), (0, 0), (0, extra)] + [(0, 0)] * len(rest))
    return x.reshape(x.shape[0], plan.heads, plan.token_rows, *rest)


def _join(plan: Plan, x):
    """The inverse of `_split`."""
    rest = x.shape[3:]
    x = x.reshape(x.shape[0], plan.num_kv_heads, plan.passes * plan.token_rows, *rest)
    return x[:, :, : plan.group].reshape(x.shape[0], plan.num_kv_heads * plan.group, *rest)


def _scales(plan: Plan, sm_scale, scales: Scales):
    """f32[2, K]: factors of the scores (to base 2, or before the cap) and of the values."""
    ones = jnp.ones((plan.num_kv_heads,), F32)
    factor = sm_scale * (LOG2E if plan.soft_cap is None else 1 / plan.soft_cap)
    keys = ones if scales.k is None else scales.k
    return jnp.stack([keys * F32(factor), ones if scales.v is None else scales.v])


class _Work(NamedTuple):
    """The tiles of a batch, and where its tokens are in the packed array and in the tiles."""

    tiles: jax.Array  # i32[tiles, 4] as `Refs.tiles`
    num_tiles: jax.Array  # i32[1] how many of them there are
    source: jax.Array  # i32[packed] the token at each place of the packed array; any at a gap
    target: jax.Array  # i32[T] the place of each token there
    tile: jax.Array  # i32[T] the tile of each token
    tile_row: jax.Array  # i32[T] its first query row in the tile


def _make_work(plan: Plan, num_tokens: int, kv_lens, cu_q_lens, ranges) -> _Work:
    """Work of the rows in range; targets of other tokens are in bounds and mean nothing."""
    size, step, num_rows = plan.tile_tokens, plan.token_step, kv_lens.shape[0]
    row = jnp.arange(num_rows, dtype=I32)
    new = cu_q_lens[1:] - cu_q_lens[:-1]
    new = jnp.where((row >= ranges[0]) & (row < ranges[2]), new, 0)
    taken = (new + (step - 1)) // step * step
    stops = jnp.cumsum(taken, dtype=I32)
    starts = stops - taken  # i32[S] a row's first place
    ends = jnp.cumsum((new + (size - 1)) // size, dtype=I32)  # i32[S] end of a row's tiles

    of, tile = _owners(ends, plan.num_tiles)
    # A row's last tile sees the most keys: it comes first, so that the short ones fill up the end.
    local = (ends[of] - 1 - tile) * size
    count = jnp.minimum(size, new[of] - local)
    position = kv_lens[of] - new[of] + local
    tiles = jnp.stack([of, (starts[of] + local) * plan.token_rows, count, position], axis=1)

    num_places = -(-(num_tokens + min(num_rows, num_tokens) * (step - 1)) // step) * step
    of, place = _owners(stops, num_places)
    source = jnp.clip(cu_q_lens[of] + place - starts[of], 0, num_tokens - 1)

    row = layout.token_places(num_tokens, kv_lens, cu_q_lens).row
    local = jnp.arange(num_tokens, dtype=I32) - cu_q_lens[row]
    return _Work(
        tiles=tiles,
        num_tiles=ends[-1:],
        source=source,
        target=jnp.clip(starts[row] + local, 0, num_places - 1),
        tile=jnp.clip(ends[row] - 1 - local // size, 0, plan.num_tiles - 1),
        tile_row=(local % size) * plan.token_rows,
    )


def _owners(ends, count: int):
    """(the row that each of `count` things belongs to, the things), by the rows' cumulative ends."""
    thing = jnp.arange(count, dtype=I32)
    row = jnp.sum((ends[None] <= thing[:, None]).astype(I32), axis=1)
    return jnp.minimum(row, ends.shape[0] - 1), thing


def _call(plan: Plan, interpret, inputs: dict):
    """Call the kernel; arguments by the names in `Refs`."""
    outputs = {
        "out": jax.ShapeDtypeStruct(inputs["q"].shape, BF16),
        "lse": jax.ShapeDtypeStruct((plan.heads, plan.num_tiles, plan.tile_rows), F32),
    }
    names = (*inputs, *outputs)

    def paged_chunks(*refs, **scratch):
        run_kernel(Refs(**dict(zip(names, refs, strict=True)), **scratch), plan)

    return compat.gpu_kernel(
        paged_chunks,
        out_type=tuple(outputs.values()),
        scratch_types=_scratch(plan),
        grid=(plan.num_programs,),
        grid_names=("program",),
        num_threads=NUM_COMPUTE + 1,
        thread_name="warpgroup",
        compiler_params=compat.GpuCompilerParams(approx_math=True),
        interpret=interpret,
    )(*inputs.values())


def _scratch(plan: Plan) -> dict[str, Any]:
    """SMEM buffers and barriers, by their names in `Refs`."""
    compute, dim = NUM_COMPUTE, plan.head_dim
    scratch = {
        "queries": _tiled((compute, WG_ROWS, dim), BF16),
        "weights": _tiled((compute, WG_ROWS, PAGE), BF16),
        "rows": compat.SMEM((compute, WG_ROWS), F32),
        "kv": _tiled((plan.num_slots, 2, PAGE, dim), BF16),
        "arrived": compat.Barrier(num_arrivals=1 + plan.has_sinks, num_barriers=compute),
        "landed": compat.Barrier(num_arrivals=2, num_barriers=plan.num_landing),
        "full": compat.Barrier(num_barriers=plan.num_slots),
        "empty": compat.Barrier(num_arrivals=compute, num_barriers=plan.num_slots),
    }
    if plan.widens:
        scratch["narrow"] = _tiled((plan.num_landing, 2, PAGE, dim), plan.kv_dtype)
    return scratch


def _tiled(shape, dtype):
    """SMEM as wgmma reads it."""
    transforms = BF16_TILES if dtype == BF16 else BYTE_TILES
    return compat.SMEM(shape, dtype, transforms=transforms)
