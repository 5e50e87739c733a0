"""Ragged paged attention for TPU: one Mosaic kernel call that writes the new tokens into their pages
and attends every row, single tokens and chunks alike.

Called by `api`; the kernel itself is `tpu_kernel`. This module lays out its arguments, chooses block
sizes and refuses what does not fit. Compiled for v5e, v5p and v6e and run in Pallas' interpreter;
it has not run on hardware, and block sizes are reasoned, not tuned.

Invariant: blocks or tables that do not fit are refused by name before anything is compiled; dtypes,
layouts and head_dims have been looked at in `dispatch`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.page_bytes import TPU_LANES, tpu_words
from pallas_kernels.ragged_paged_attention import layout
from pallas_kernels.ragged_paged_attention.tpu_kernel import F32, Plan, run_kernel
from pallas_kernels.tpu_smem import check_smem

# What the kernel claims of VMEM. The compiler's own default is 16 MiB on v5e and v5p.
VMEM_LIMIT_BYTES = 32 * 1024 * 1024
# Ours, when the caller gives no `blocks`: a block of about a MiB, which a DMA engine moves near its
# full rate, of 64 to 512 tokens; a tile as large as half of VMEM_LIMIT_BYTES allows.
BLOCK_BYTES = 1024 * 1024
BLOCK_TOKENS = (64, 512)
MAX_TILE_TOKENS = 128


def attend(q, k_new, v_new, kv, rows, scales, sinks, *, options, blocks, interpret):
    """See `api.ragged_paged_attention`.

    `blocks` is a pair: pages in a block of keys, query tokens in a tile. `interpret` is None or
    False for the device, True or `compat.TpuInterpretParams` for Pallas' interpreter.
    """
    interpret = compat.interpreter(interpret, compat.TpuInterpretParams)
    plan = make_plan(
        q,
        kv,
        num_rows=rows.kv_lens.shape[0],
        num_entries=rows.page_table.shape[0],
        window=options.window,
        soft_cap=options.soft_cap,
        has_sinks=sinks is not None,
        return_lse=options.return_lse,
        writes=k_new is not None,
        blocks=blocks,
        interpreted=bool(interpret),
    )
    new = None
    if k_new is not None:
        k = layout.encode(k_new, kv.dtype, scales.k)
        v = layout.encode(v_new, kv.dtype, scales.v)
        new = layout.pack_tpu_rows(k, v)
    ones = jnp.ones((kv.num_kv_heads,), F32)
    factors = (
        (ones if scales.k is None else scales.k) * options.sm_scale,
        ones if scales.v is None else scales.v,
    )
    out, pages, lse = _attend(
        q, new, kv.data[0], rows, factors, sinks, plan=plan, interpret=interpret
    )
    kv = dataclasses.replace(kv, data=(pages,))
    return out, kv, lse


def make_plan(q, kv, *, num_rows: int, num_entries: int, blocks=None, **options) -> Plan:
    """What to compile for a call; refuses what this backend does not serve or what does not fit.

    Args:
        q: [T, H, D], abstract or not. kv: the pool, abstract or not.
        num_rows: S.
        num_entries: S * P, size of the page table.
        blocks: as `attend`'s.
        options: the fields of `Plan` from `window` on.

    Raises:
        ValueError: a page table too large for SMEM, or blocks too large for VMEM.
    """
    pages_per_row = num_entries // num_rows
    check_smem(num_rows, pages_per_row, kv.num_kv_heads)
    num_tokens, num_heads, head_dim = q.shape
    words, pack = tpu_words(kv.num_kv_heads, head_dim, kv.dtype.itemsize)
    plan = Plan(
        num_kv_heads=kv.num_kv_heads,
        head_dim=head_dim,
        group=max(4 // q.dtype.itemsize, _next_power_of_2(num_heads // kv.num_kv_heads)),
        pages_per_row=pages_per_row,
        page_size=kv.page_size,
        words=words,
        pack=pack,
        block_pages=1,
        tile_tokens=1,
        q_dtype=q.dtype,
        kv_dtype=kv.dtype,
        **options,
    )
    return _with_blocks(plan, blocks, num_tokens)


# A jit of its own: an unrolled model traces and lowers it once, not once per layer.
@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def _attend(q, new, pages, rows, factors, sinks, *, plan, interpret):
    """(out [T, H, D], the pool's array, lse f32[T, H] or None)."""
    num_tokens, num_heads, head_dim = q.shape
    kv_heads, group = plan.num_kv_heads, num_heads // plan.num_kv_heads
    extra = [(0, 0), (0, 0), (0, plan.group - group), (0, plan.width - head_dim)]
    grouped = jnp.pad(q.reshape(num_tokens, kv_heads, group, head_dim), extra).swapaxes(0, 1)
    if sinks is not None:
        sinks = jnp.pad(sinks.reshape(kv_heads, group), extra[1:3])
        sinks = jnp.broadcast_to(sinks[:, :, None], (kv_heads, plan.group, TPU_LANES))
    result = _call(
        plan,
        interpret,
        {
            "kv_lens": rows.kv_lens - rows.kv_starts,
            "page_table": rows.page_table,
            "cu_q_lens": rows.cu_q_lens,
            "next_row": _next_row(rows.cu_q_lens),
            "ranges": rows.ranges,
            "k_scale": factors[0],
            "v_scale": factors[1],
        },
        {"q": grouped, "new": new, "sinks": sinks, "pages": pages},
    )
    live = (
        jnp.arange(num_tokens, dtype=jnp.int32) < rows.cu_q_lens[-1]
    )  # the kernel leaves others be

    def by_token(x, lanes):
        x = x[:, :, :group, lanes].swapaxes(0, 1).reshape(num_tokens, num_heads, -1)
        return jnp.where(live[:, None, None], x, jnp.zeros_like(x))

    out = by_token(result["out"], slice(plan.width - head_dim, None))
    lse = by_token(result["lse"], slice(0, 1))[:, :, 0] if plan.return_lse else None
    return out, result.get("pages", pages), lse


def _call(plan: Plan, interpret, scalars: dict, arrays: dict) -> dict[str, jax.Array]:
    """Call the kernel; arguments and results by the names in `Refs`."""
    inputs = {name: a for name, a in arrays.items() if a is not None}
    q, pages = inputs["q"], inputs["pages"]
    outputs = {"out": jax.ShapeDtypeStruct(q.shape, q.dtype)}
    aliases = {}
    if plan.writes:
        outputs["pages"] = jax.ShapeDtypeStruct(pages.shape, pages.dtype)
        inputs["pages_in"] = inputs.pop("pages")
        aliases = {len(scalars) + list(inputs).index("pages_in"): list(outputs).index("pages")}
    if plan.return_lse:
        outputs["lse"] = jax.ShapeDtypeStruct((*q.shape[:3], TPU_LANES), F32)
    scratch = {name: compat.VMEM(*spec) for name, spec in _vmem_buffers(plan).items()}
    dma = compat.DmaSemaphore
    scratch |= {"kv_sem": dma((2,)), "q_sem": dma, "out_sem": dma, "write_sem": dma}
    hbm = compat.BlockSpec(memory_space=compat.ANY)
    vmem = compat.BlockSpec(memory_space=compat.VMEM)
    call = compat.pallas_call(
        functools.partial(run_kernel, names=(*scalars, *inputs, *outputs, *scratch), plan=plan),
        name="ragged_paged_attention",
        grid_spec=compat.TpuGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[vmem if name == "sinks" else hbm for name in inputs],
            out_specs=[hbm] * len(outputs),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=list(outputs.values()),
        input_output_aliases=aliases,
        compiler_params=compat.TpuCompilerParams(vmem_limit_bytes=VMEM_LIMIT_BYTES),
        interpret=interpret,
    )
    return dict(zip(outputs, call(*scalars.values(), *inputs.values()), strict=True))


def _next_row(cu_q_lens):
    """i32[S+1]: the first row at or after s that has tokens; S where there is none."""
    num_rows = cu_q_lens.shape[0] - 1
    row = jnp.arange(num_rows, dtype=jnp.int32)
    row = jnp.where(cu_q_lens[1:] > cu_q_lens[:-1], row, num_rows)
    return jnp.append(lax.cummin(row, reverse=True), jnp.int32(num_rows))


# -- what fits


def _vmem_buffers(plan: Plan) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of each VMEM buffer, by its name in `Refs`."""
    heads, tokens, group, width = plan.num_kv_heads, plan.tile_tokens, plan.group, plan.width
    rows = tokens * group
    buffers = {
        "kv_buf": ((2, plan.block_tokens, plan.words, plan.pack, TPU_LANES), plan.kv_dtype),
        "q_buf": ((heads, tokens, group, width), plan.q_dtype),
        "q_rows": ((heads, rows, width), plan.compute_dtype),
        "top": ((heads, rows, TPU_LANES), F32),
        "total": ((heads, rows, TPU_LANES), F32),
        "acc": ((heads, rows, width), F32),
        "out_buf": ((heads, tokens, group, width), plan.q_dtype),
    }
    if plan.return_lse:
        buffers["lse_buf"] = ((heads, tokens, group, TPU_LANES), F32)
    return buffers


def vmem_bytes(plan: Plan) -> int:
    """VMEM that a plan needs: its buffers, the sinks twice, as Pallas holds a program's inputs, and an
    allowance for what the compiler adds.

    The allowance is six tiles of scores and twelve f32 copies of one head's keys: more than the
    compiler's own account, read from its error under a limit too small, for eleven plans on v5e.
    """
    buffers = _vmem_buffers(plan).values()
    scores = 4 * plan.tile_tokens * plan.group * plan.block_tokens
    keys = 4 * plan.block_tokens * plan.width
    sizes = (math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in buffers)
    sinks = 4 * plan.num_kv_heads * plan.group * TPU_LANES if plan.has_sinks else 0
    return sum(sizes) + 2 * sinks + 6 * scores + 12 * keys


def _with_blocks(plan: Plan, blocks, num_tokens: int) -> Plan:
    """The plan with the block sizes asked for, or the largest of ours that leave VMEM half empty."""
    if blocks is not None:
        if len(blocks) != 2 or not all(isinstance(n, int) and n > 0 for n in blocks):
            raise ValueError(f"blocks={blocks!r}: expected (pages in a block, tokens in a tile)")
        plan = dataclasses.replace(plan, block_pages=blocks[0], tile_tokens=blocks[1])
    else:
        token_bytes = plan.words * plan.pack * TPU_LANES * plan.kv_dtype.itemsize
        size = min(max(BLOCK_BYTES // token_bytes, BLOCK_TOKENS[0]), BLOCK_TOKENS[1])
        pages = min(plan.pages_per_row, max(1, size // plan.page_size))
        tokens = min(MAX_TILE_TOKENS, _next_power_of_2(num_tokens))
        plan = dataclasses.replace(plan, block_pages=pages, tile_tokens=tokens)
        while plan.tile_tokens > 1 and 2 * vmem_bytes(plan) > VMEM_LIMIT_BYTES:
            plan = dataclasses.replace(plan, tile_tokens=plan.tile_tokens // 2)
    needed = vmem_bytes(plan)
    if needed > VMEM_LIMIT_BYTES:
        raise ValueError(
            f"blocks: {plan.block_pages} pages of {plan.page_size} tokens and tiles of "
            f"{plan.tile_tokens} tokens with {plan.num_kv_heads} KV heads take {needed} bytes of "
            f"VMEM, attention backend 'tpu' claims {VMEM_LIMIT_BYTES}; take smaller blocks"
        )
    return plan


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
