"""The plain truth: ragged paged attention written down as its definition, token by token.

Called by tests and by `--attention_backend=reference`. It serves every option of the interface and
every layout, and is slow. Invariant: nothing here is clever.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import layout


def attend(q, k_new, v_new, kv, rows, scales, sinks, *, options, blocks, interpret):
    """See `api.ragged_paged_attention`; one token at a time over the whole of its row's table."""
    del interpret  # dispatch refused it: there is no kernel
    if blocks is not None:
        raise NotImplementedError("blocks: attention backend 'reference' has none")
    if k_new is not None:
        kv = layout.write(kv, k_new, v_new, rows, scales)
    table = rows.page_table.reshape(rows.kv_lens.shape[0], -1)  # i32[S, P]
    places = layout.token_places(q.shape[0], rows.kv_lens, rows.cu_q_lens)

    def one_token(inputs):
        query, row, position, live = inputs
        pages = kv.gather(table[row]).transpose(2, 0, 3, 1, 4)  # [2, P, page, K, D]
        pages = pages.reshape(2, -1, kv.num_kv_heads, kv.head_dim)  # [2, C, K, D]
        keys, values = _decode(pages[0], scales.k), _decode(pages[1], scales.v)
        key_position = rows.kv_starts[row] + jnp.arange(keys.shape[0], dtype=jnp.int32)  # i32[C]
        seen = key_position <= position
        if options.window is not None:
            seen &= key_position > position - options.window
        out, lse = _softmax(
            query.astype(jnp.float32) * options.sm_scale,
            keys,
            values,
            seen,
            options.soft_cap,
            sinks,
        )
        # A padding token sees whatever row it was given: its result is thrown away, NaN and all.
        out = out.astype(q.dtype)
        return jnp.where(live, out, jnp.zeros_like(out)), jnp.where(live, lse, 0.0)

    out, lse = jax.lax.map(one_token, (q, places.row, places.position, places.live))
    return out, kv, (lse if options.return_lse else None)


def _softmax(query, keys, values, seen, soft_cap, sinks):
    """(out f32[H, D], lse f32[H]) of one scaled query f32[H, D] over keys, values f32[C, K, D]."""
    heads, kv_heads = query.shape[0], keys.shape[1]
    # Unseen slots may hold NaN, and 0 * NaN is NaN: values are masked as well as scores.
    values = jnp.where(seen[:, None, None], values, 0.0)
    grouped = query.reshape(kv_heads, heads // kv_heads, -1)
    scores = jnp.einsum("kgd,ckd->kgc", grouped, keys, precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[None, None, :], scores, -jnp.inf).reshape(heads, -1)  # f32[H, C]
    if sinks is not None:
        scores = jnp.concatenate([scores, sinks[:, None]], axis=1)
    lse = jax.nn.logsumexp(scores, axis=1)
    weights = jnp.exp(scores - lse[:, None])[:, : keys.shape[0]]
    weights = weights.reshape(kv_heads, heads // kv_heads, -1)
    out = jnp.einsum("kgc,ckd->kgd", weights, values, precision="highest")
    return out.reshape(heads, -1), lse


def _decode(x, scale):
    """Pool elements [C, K, D] as f32; scale f32[K] or None."""
    x = x.astype(jnp.float32)
    return x if scale is None else x * scale[None, :, None]
