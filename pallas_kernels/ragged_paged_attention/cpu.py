"""Ragged paged attention on CPU in C++ (cpu.cc), through jax.ffi: float32, in place, on XLA's own threads.

Called by `api`. Invariant: the call owns nothing between two steps; whoever donates the pool has it
updated in place, and whoever does not finds it unchanged. A page id, length or count that does not
fit is an error of the call with INVALID_ARGUMENT: a JaxRuntimeError where jax runs it at once, else a
ValueError where its result is waited for.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import load

TARGET = "jaxserve_ragged_paged_attention"


def attend(q, k_new, v_new, kv, rows, scales, sinks, *, options, blocks, interpret):
    """See `api.ragged_paged_attention`; `blocks` is not read: the kernel's own are fixed."""
    del scales, blocks, interpret  # dispatch refused 8-bit pools, and there is nothing to interpret
    load.register()
    num_tokens, num_heads, _ = q.shape
    nothing = jnp.zeros(0, jnp.float32)
    (pool,) = kv.data
    lse_shape = (num_tokens, num_heads) if options.return_lse else (0,)
    call = jax.ffi.ffi_call(
        TARGET,
        (
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
            jax.ShapeDtypeStruct(lse_shape, jnp.float32),
        ),
        input_output_aliases={3: 1},
    )
    out, pool, lse = call(
        q,
        nothing if k_new is None else k_new,
        nothing if v_new is None else v_new,
        pool,
        rows.kv_lens,
        rows.page_table,
        rows.kv_starts,
        rows.cu_q_lens,
        rows.ranges,
        nothing if sinks is None else sinks,
        scale=np.float32(options.sm_scale),
        soft_cap=np.float32(options.soft_cap or 0.0),
        window=np.int32(options.window or 0),
    )
    kv = dataclasses.replace(kv, data=(pool,))
    return out, kv, (lse if options.return_lse else None)
