"""Ragged paged attention in plain XLA operations: the production path on CPU, portable to every platform.

Called by `api`. Cost follows the live context: loops run to traced trip counts (rows, tokens and pages that exist),
so padded rows cost nothing. Rows with one token go in tiles of rows (`_single_token_rows`), the others in tiles of
tokens of one row (`_chunk_rows`); both keep a running maximum and sum (online softmax, Milakov and Gimelshein 2018).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention import layout

# Finite, so that exp(NEG - NEG) is not NaN; far below any score that a head can produce.
NEG = -1e30


class _Call(NamedTuple):
    """What both halves read: the arguments of the call after the write."""

    q: Any  # f32[T + pad, K, G, D], scaled
    kv: layout.KVPages
    kv_lens: Any  # i32[S + pad]
    kv_starts: Any  # i32[S + pad]
    cu_q_lens: Any  # i32[S + 1]
    table: Any  # i32[S + pad, P]
    k_scale: Any  # f32[K] | None
    v_scale: Any  # f32[K] | None
    window: int | None
    soft_cap: float | None


class _State(NamedTuple):
    """A running softmax over the pages seen so far."""

    m: Any  # f32[..., 1] largest score
    l: Any  # f32[..., 1] sum of exp(score - m)
    acc: Any  # f32[..., D] sum of exp(score - m) * value


def attend(
    q,
    k_new,
    v_new,
    kv,
    kv_lens,
    page_table,
    kv_starts,
    cu_q_lens,
    ranges,
    k_scale,
    v_scale,
    sinks,
    *,
    sm_scale,
    window,
    soft_cap,
    return_lse,
    blocks,
    interpret,
):
    """See `api.ragged_paged_attention`. `blocks` is (rows a tile, tokens a tile, pages a block of a chunk)."""
    if interpret is not None:
        raise NotImplementedError("interpret: attention backend 'xla' has no kernel to interpret")
    num_tokens, heads, head_dim = q.shape
    num_rows, kv_heads = kv_lens.shape[0], kv.num_kv_heads
    row_tile, token_tile, page_block = blocks or _default_blocks(num_tokens, num_rows, kv.page_size)
    if k_new is not None:
        kv = layout.write(
            kv, k_new, v_new, kv_lens, page_table, kv_starts, cu_q_lens, k_scale, v_scale
        )
        # Without it XLA fuses the write into the read when one row is written and read, which keeps the old pool
        # alive and so copies all of it (cpu: 10 to 180 ms a step at batch 1).
        kv = lax.optimization_barrier(kv)

    pad = max(row_tile, token_tile)
    scaled = q.astype(jnp.float32) * sm_scale
    scaled = scaled.reshape(num_tokens, kv_heads, heads // kv_heads, head_dim)
    call = _Call(
        q=_pad_rows(scaled, pad),
        kv=kv,
        kv_lens=_pad_rows(kv_lens, row_tile),
        kv_starts=_pad_rows(kv_starts, row_tile),
        cu_q_lens=cu_q_lens,
        table=_pad_rows(page_table.reshape(num_rows, -1), row_tile),
        k_scale=k_scale,
        v_scale=v_scale,
        window=window,
        soft_cap=soft_cap,
    )
    out = jnp.zeros_like(call.q)
    lse = jnp.zeros(call.q.shape[:-1], jnp.float32)
    sinks = None if sinks is None else sinks.reshape(kv_heads, heads // kv_heads)
    out, lse = _single_token_rows(call, sinks, ranges[0], row_tile, out, lse)
    if num_tokens > 1:
        out, lse = _chunk_rows(call, sinks, ranges, token_tile, page_block, out, lse)
    out = out[:num_tokens].reshape(q.shape).astype(q.dtype)
    return out, kv, (lse[:num_tokens].reshape(num_tokens, heads) if return_lse else None)


def _default_blocks(num_tokens: int, num_rows: int, page_size: int) -> tuple[int, int, int]:
    return min(num_tokens, num_rows, 8), min(num_tokens, 128), max(1, 256 // page_size)


def _pad_rows(x, n):
    """Zeros behind the first axis, so that a tile that begins inside never runs over the end."""
    return jnp.pad(x, ((0, n),) + ((0, 0),) * (x.ndim - 1))


def _single_token_rows(call, sinks, num_single, row_tile, out, lse):
    """Rows [0, num_single): row i is token i."""
    page = call.kv.page_size
    slot = jnp.arange(page, dtype=jnp.int32)  # i32[page]

    def tile(i, carry):
        out, lse = carry
        first = i * row_tile
        take = functools.partial(lax.dynamic_slice_in_dim, start_index=first, slice_size=row_tile)
        live = first + jnp.arange(row_tile, dtype=jnp.int32) < num_single
        starts = take(call.kv_starts)
        # index of the row's one token in its pages; -1 hides every slot of a row that is not there
        last = jnp.where(live, take(call.kv_lens) - starts - 1, -1)  # i32[RB]
        low = jnp.zeros_like(last)
        if call.window is not None:
            low = jnp.maximum(last - call.window + 1, 0)
        table, query = take(call.table), take(call.q)  # i32[RB, P], f32[RB, K, G, D]

        def column(j, state):
            ids = lax.dynamic_index_in_dim(table, j, axis=1, keepdims=False)  # i32[RB]
            pages = call.kv.gather(ids)  # [RB, K, 2, page, D]
            index = j * page + slot[None, :]
            seen = (index <= last[:, None]) & (index >= low[:, None])  # bool[RB, page]
            keys, values = _decode(call, pages[:, :, 0]), _decode(call, pages[:, :, 1], values=True)
            values = jnp.where(seen[:, None, :, None], values, 0.0)
            scores = jnp.sum(query[:, :, :, None, :] * keys[:, :, None, :, :], axis=-1)
            scores = _mask(call, scores, seen[:, None, None, :])
            return _update(state, scores, values, "rkgc,rkcd->rkgd")

        begin = jnp.min(jnp.where(live, low, jnp.int32(2**30))) // page
        state = lax.fori_loop(begin, jnp.max(last) // page + 1, column, _fresh(query))
        return _store(call, sinks, state, live, first, out, lse)

    return lax.fori_loop(0, (num_single + row_tile - 1) // row_tile, tile, (out, lse))


def _chunk_rows(call, sinks, ranges, token_tile, page_block, out, lse):
    """Rows [ranges[0], ranges[2]): tiles of tokens of one row against blocks of its pages."""
    page = call.kv.page_size
    block = page * page_block
    pages_per_row = call.table.shape[1]
    slot = jnp.arange(block, dtype=jnp.int32)
    token = jnp.arange(token_tile, dtype=jnp.int32)

    def row(r, carry):
        begin, end = call.cu_q_lens[r], call.cu_q_lens[r + 1]
        length = call.kv_lens[r] - call.kv_starts[r]  # tokens in the row's pages
        table = call.table[r]

        def tile(i, carry):
            out, lse = carry
            first = begin + i * token_tile
            live = first + token < end
            query = lax.dynamic_slice_in_dim(call.q, first, token_tile)
            query = query.transpose(1, 2, 0, 3)  # f32[K, G, TB, D]
            # index of each token in the row's pages; tokens of the next row see the whole of this one, to no effect
            index = jnp.minimum(length - (end - first) + token, length - 1)  # i32[TB]
            low = 0 if call.window is None else jnp.maximum(index[0] - call.window + 1, 0)

            def columns(j, state):
                at = j * page_block + jnp.arange(page_block, dtype=jnp.int32)
                ids = jnp.where(at < pages_per_row, table[jnp.minimum(at, pages_per_row - 1)], 0)
                pages = call.kv.gather(ids)  # [PB, K, 2, page, D]
                pages = pages.transpose(2, 1, 0, 3, 4)
                pages = pages.reshape(2, pages.shape[1], block, -1)  # [2, K, C, D]
                key = j * block + slot
                seen = key[None, :] <= index[:, None]  # bool[TB, C]
                if call.window is not None:
                    seen &= key[None, :] > index[:, None] - call.window
                # rows of keys that no token sees may hold NaN
                values = jnp.where((key < length)[None, :, None], _decode(call, pages[1], True), 0.0)
                keys = _decode(call, pages[0])
                scores = jnp.einsum("kgtd,kcd->kgtc", query, keys, precision="highest")
                scores = _mask(call, scores, seen[None, None])
                return _update(state, scores, values, "kgtc,kcd->kgtd")

            state = lax.fori_loop(low // block, index[-1] // block + 1, columns, _fresh(query))
            state = _State(*(x.transpose(2, 0, 1, 3) for x in state))
            return _store(call, sinks, state, live, first, out, lse)

        return lax.fori_loop(0, (end - begin + token_tile - 1) // token_tile, tile, carry)

    return lax.fori_loop(ranges[0], ranges[2], row, (out, lse))


def _fresh(query):
    shape = query.shape[:-1]
    return _State(
        jnp.full((*shape, 1), NEG, jnp.float32),
        jnp.zeros((*shape, 1), jnp.float32),
        jnp.zeros(query.shape, jnp.float32),
    )


def _decode(call, x, values=False):
    """Pool elements [.., K, C, D] as f32."""
    scale = call.v_scale if values else call.k_scale
    x = x.astype(jnp.float32)
    if scale is None:
        return x
    return x * scale.reshape((1,) * (x.ndim - 3) + (-1, 1, 1))


def _mask(call, scores, seen):
    if call.soft_cap is not None:
        scores = call.soft_cap * jnp.tanh(scores / call.soft_cap)
    return jnp.where(seen, scores, NEG)


def _update(state, scores, values, product):
    """Fold scores f32[.., C] (unseen ones NEG) and their values into the state."""
    m = jnp.maximum(state.m, jnp.max(scores, axis=-1, keepdims=True))
    # A token that has seen nothing yet has m = NEG: exp(0) = 1 would count unseen slots.
    p = jnp.where(scores > NEG, jnp.exp(scores - m), 0.0)
    alpha = jnp.exp(state.m - m)
    acc = jnp.einsum(product, p, values, precision="highest")
    return _State(m, alpha * state.l + jnp.sum(p, axis=-1, keepdims=True), alpha * state.acc + acc)


def _store(call, sinks, state, live, first, out, lse):
    """Write a tile's results at token `first`; tokens that are not live get zeros (later rows overwrite them)."""
    m, l, acc = state  # f32[n, K, G, 1 | 1 | D]
    if sinks is not None:
        sink = sinks[None, :, :, None]
        top = jnp.maximum(m, sink)
        scale = jnp.exp(m - top)
        m, l, acc = top, l * scale + jnp.exp(sink - top), acc * scale
    keep = live[:, None, None, None] & (l > 0)
    safe = jnp.where(keep, l, 1.0)
    out = lax.dynamic_update_slice_in_dim(out, jnp.where(keep, acc / safe, 0.0), first, axis=0)
    value = jnp.where(keep, m + jnp.log(safe), 0.0)[..., 0]
    return out, lax.dynamic_update_slice_in_dim(lse, value, first, axis=0)
