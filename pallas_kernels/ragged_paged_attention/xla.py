"""Ragged paged attention in plain XLA operations: the production path on CPU, portable everywhere.

Called by `api`. Invariant: the cost follows the live context. Loops run to traced trip counts, so
padded rows, padded tokens and unused table entries cost nothing. Rows with one token share one
dense list of their pages (`_single_token_rows`); the others go row by row in tiles of tokens
against blocks of keys (`_chunk_rows`). Both keep a running maximum and sum per token.

What was measured (2 CPU cores, f32, 9/3 heads of 64): keys and values in arrays of their own, so
that no slice copies them; pages gathered as rows of a flat array, which is a plain memory copy;
few, large operations, as each costs some microseconds.

Source: online softmax, Milakov and Gimelshein 2018; partial results of parts of a row merged by
their maxima, "Flash-Decoding", Dao et al. 2023.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.float8 import as_type
from pallas_kernels.ragged_paged_attention import layout

# Finite, so that exp(NEG - NEG) is not NaN; far below any score that a head can produce.
NEG = -1e30


class _Batch(NamedTuple):
    """What both halves read: the call's arguments after the write."""

    q: Any  # f32[T, K, G, D], scaled
    keys: Any  # [N*K, page*D]
    values: Any  # [N*K, page*D]
    kv_lens: Any  # i32[S]
    kv_starts: Any  # i32[S]
    cu_q_lens: Any  # i32[S+1]
    table: Any  # i32[S, P]
    ranges: Any  # i32[3]
    k_scale: Any  # f32[K] | None
    v_scale: Any  # f32[K] | None
    sinks: Any  # f32[K, G] | None
    kv_dtype: Any  # of keys and values, which may be held as bytes

    @property
    def page_size(self) -> int:
        return self.keys.shape[1] // self.q.shape[3]


class _Softmax(NamedTuple):
    """A softmax over the keys seen so far, one per token and head."""

    top: Any  # f32[..] the largest score
    total: Any  # f32[..] sum of exp(score - top)
    acc: Any  # f32[.., D] sum of exp(score - top) * value


def attend(q, k_new, v_new, kv, rows, scales, sinks, *, options, blocks, interpret):
    """See `api.ragged_paged_attention`.

    `blocks` is a pair: pages of single-token rows handled at once, and a tuple of (tokens, pages)
    tiles for the other rows, small to large; a row takes the first whose tokens hold half of it.
    """
    del interpret  # dispatch refused it: there is no kernel to interpret
    blocks = blocks or default_blocks(q.shape[0], kv.page_size)
    return _attend(q, k_new, v_new, kv, rows, scales, sinks, options=options, blocks=blocks)


def default_blocks(num_tokens: int, page_size: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """The tuned `blocks` for T tokens and a page size; fewer rows have fewer pages to fill a step."""
    context = 512 if num_tokens <= 4 else 1024
    pages = min(128, max(1, context // page_size))
    small, large = (32, max(1, 64 // page_size)), (128, max(1, 256 // page_size))
    return pages, (small,) if num_tokens <= 2 * small[0] else (small, large)


# A jit of its own: an unrolled model traces and lowers it once, not once per layer.
@functools.partial(jax.jit, static_argnames=("options", "blocks"))
def _attend(q, k_new, v_new, kv, rows, scales, sinks, *, options, blocks):
    num_tokens, heads, head_dim = q.shape
    kv_heads = kv.num_kv_heads
    if k_new is not None:
        kv = layout.write(kv, k_new, v_new, rows, scales)
        # Without it XLA fuses the write into the read when one row is written and read; the old
        # pool then outlives the write, and all of it is copied (10 to 180 ms a step at batch 1).
        kv = lax.optimization_barrier(kv)
    groups = (kv_heads, heads // kv_heads)
    scaled = q.astype(jnp.float32) * options.sm_scale
    keys, values = (a.reshape(-1, kv.page_size * head_dim) for a in kv.data)
    batch = _Batch(
        q=scaled.reshape(num_tokens, *groups, head_dim),
        keys=keys,
        values=values,
        kv_lens=rows.kv_lens,
        kv_starts=rows.kv_starts,
        cu_q_lens=rows.cu_q_lens,
        table=rows.page_table.reshape(rows.kv_lens.shape[0], -1),
        ranges=rows.ranges,
        k_scale=scales.k,
        v_scale=scales.v,
        sinks=None if sinks is None else sinks.reshape(groups),
        kv_dtype=kv.dtype,
    )
    num_pages, tiles = blocks
    results = _single_token_rows(batch, options, num_pages)
    if num_tokens > 1:
        results = _chunk_rows(batch, options, tiles, results)
    out = results[0].reshape(q.shape).astype(q.dtype)
    return out, kv, (results[1].reshape(num_tokens, heads) if options.return_lse else None)


def _single_token_rows(batch, options, num_items):
    """Attend rows [0, ranges[0]); row i is token i.

    The pages of all these rows form one list; a step of the loop takes `num_items` of them,
    whichever rows they belong to, so uneven lengths waste nothing:

        row    0 0 0 1 1 1 1 1 2 2 . .      item = (row, page of the row)
        step   |--- 0 ---|--- 1 ---|        a row's softmax carries over from step to step

    Returns:
        (out f32[T, K, G, D], lse f32[T, K, G] if asked for), zeros for all other tokens.
    """
    num_tokens, kv_heads, _, head_dim = batch.q.shape
    num_rows, width = min(num_tokens, batch.kv_lens.shape[0]), batch.table.shape[1]
    page, reach = batch.page_size, min(num_items, num_rows)  # a step touches at most `reach` rows
    last = (batch.kv_lens - batch.kv_starts)[:num_rows] - 1  # i32[R] the token's place in its pages
    low = jnp.zeros_like(last)
    if options.window is not None:
        low = jnp.maximum(last - options.window + 1, 0)
    exists = jnp.arange(num_rows, dtype=jnp.int32) < batch.ranges[0]
    count = jnp.where(exists, last // page - low // page + 1, 0)
    ends = jnp.cumsum(count)  # i32[R] where each row's items end in the list
    first_page = low // page - (ends - count)  # add an item's number to get its page of the row
    query = batch.q[:num_rows]
    item_of_step = jnp.arange(num_items, dtype=jnp.int32)
    offset = jnp.arange(page, dtype=jnp.int32)

    def step(i, state):
        item = i * num_items + item_of_step
        row = jnp.sum((ends[None, :] <= item[:, None]).astype(jnp.int32), axis=1)
        live = row < num_rows
        row = jnp.minimum(row, num_rows - 1)
        column = jnp.clip(first_page[row] + item, 0, width - 1)
        ids = jnp.where(live, batch.table[row, column], 0)
        place = column[:, None] * page + offset[None, :]
        seen = live[:, None] & (place <= last[row][:, None]) & (place >= low[row][:, None])
        heads = ids[:, None] * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)[None, :]
        keys = _take(
            batch.keys, batch.kv_dtype, heads, batch.k_scale, head_dim
        )  # f32[I, K, page, D]
        values = _take(batch.values, batch.kv_dtype, heads, batch.v_scale, head_dim)
        # Unseen slots may hold NaN, and 0 * NaN is NaN.
        values = jnp.where(seen[:, None, :, None], values, 0.0)
        scores = jnp.einsum("ikgd,ikcd->ikgc", query[row], keys, precision="highest")
        scores = _mask(scores, seen[:, None, None, :], options)

        # A step's rows follow each other from row[0] on.
        owner = jnp.minimum(row - row[0], reach - 1)  # i32[I]
        owns = (owner[None, :] == jnp.arange(reach, dtype=jnp.int32)[:, None]) & live[None, :]
        old = _Softmax(*(lax.dynamic_slice_in_dim(x, row[0], reach) for x in state))
        both = zip(state, _merge_items(old, scores, values, owner, owns), strict=True)
        return _Softmax(*(lax.dynamic_update_slice_in_dim(x, y, row[0], axis=0) for x, y in both))

    # `reach` spare rows: a window of rows that begins at the last one still fits.
    state = _fresh((num_rows + reach, *query.shape[1:]))
    state = lax.fori_loop(0, (ends[-1] + num_items - 1) // num_items, step, state)
    done = _finish(state, batch.sinks, options)
    fill = (0, num_tokens - num_rows)
    # Rows beyond ranges[0] saw nothing and have total 0: _finish made them zeros.
    return tuple(jnp.pad(x[:num_rows], (fill, *((0, 0),) * (x.ndim - 1))) for x in done)


def _merge_items(old, scores, values, owner, owns):
    """Merge the items of each row, and both with what the row had before.

    Args:
        old: the softmaxes of R rows, [R, K, G, ..].
        scores: f32[I, K, G, page], masked. values: f32[I, K, page, D].
        owner: i32[I], an item's row. owns: bool[R, I], the same but for items that are not live.
    """
    item_top = jnp.where(owns[:, :, None, None], jnp.max(scores, axis=-1)[None], NEG)
    top = jnp.maximum(old.top, jnp.max(item_top, axis=1))  # f32[R, K, G]
    weights = jnp.exp(scores - top[owner][..., None])
    product = jnp.einsum("ikgc,ikcd->ikgd", weights, values, precision="highest")
    total = jnp.sum(weights, axis=-1)
    owned = owns.astype(jnp.float32)
    add = functools.partial(jnp.einsum, "ri,i...->r...", owned, precision="highest")
    # A row whose keys or values are NaN must not reach the others through 0 * NaN in these sums: its
    # items count as nothing, and its own total becomes NaN.
    sound = jnp.isfinite(total) & jnp.all(jnp.isfinite(product), axis=-1)  # bool[I, K, G]
    total = add(jnp.where(sound, total, 0.0))
    total = jnp.where(add(jnp.where(sound, 0.0, 1.0)) > 0, jnp.nan, total)
    fade = jnp.exp(old.top - top)
    return _Softmax(
        top,
        old.total * fade + total,
        old.acc * fade[..., None] + add(jnp.where(sound[..., None], product, 0.0)),
    )


def _chunk_rows(batch, options, tiles, results):
    """Attend rows [ranges[0], ranges[2]) and put what they give in `results`.

    Rows come in order of their tokens, so the short ones, for which small tiles pay, come first.
    Any split between tile sizes gives the right result.
    """
    num_tokens = batch.q.shape[0]
    pad = max(tokens for tokens, _ in tiles)  # the last tile of a row may reach behind the end
    batch = batch._replace(q=_pad(batch.q, pad))
    results = tuple(_pad(x, pad) for x in results)
    lengths = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    row = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    begin = batch.ranges[0]
    for tokens, pages in tiles:
        end = batch.ranges[2]
        if (tokens, pages) != tiles[-1]:
            fits = (row >= begin) & (row < end) & (lengths <= 2 * tokens)
            end = begin + jnp.sum(fits.astype(jnp.int32))
        body = functools.partial(_chunk_row, batch, options, tokens, pages)
        results = lax.fori_loop(begin, end, body, results)
        begin = end
    return tuple(x[:num_tokens] for x in results)


def _chunk_row(batch, options, num_tokens, num_pages, row, results):
    """One row: tiles of `num_tokens` tokens, each against blocks of `num_pages` pages up to it."""
    kv_heads, group, head_dim = batch.q.shape[1:]
    block = batch.page_size * num_pages
    begin, end = batch.cu_q_lens[row], batch.cu_q_lens[row + 1]
    length = batch.kv_lens[row] - batch.kv_starts[row]  # tokens in the row's pages
    pages = jnp.pad(batch.table[row], (0, num_pages))
    head = jnp.arange(kv_heads, dtype=jnp.int32)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    slot = jnp.arange(block, dtype=jnp.int32)

    def tile(i, results):
        first = begin + i * num_tokens
        live = first + token < end
        query = lax.dynamic_slice_in_dim(batch.q, first, num_tokens).transpose(1, 2, 0, 3)
        query = query.reshape(kv_heads, group * num_tokens, head_dim)  # f32[K, M, D]
        # Each token's place in the row's pages; tokens that belong to the next row are kept in
        # bounds and thrown away.
        place = jnp.minimum(length - (end - first) + token, length - 1)
        low = jnp.zeros_like(length)
        if options.window is not None:
            low = jnp.maximum(place[0] - options.window + 1, 0)  # the first key any token sees
        places = jnp.tile(place, group)[:, None]  # i32[M, 1]

        def columns(j, state):
            ids = lax.dynamic_slice_in_dim(pages, j * num_pages, num_pages)
            heads = ids[None, :] * kv_heads + head[:, None]
            keys = _take(batch.keys, batch.kv_dtype, heads, batch.k_scale, head_dim, head_axis=0)
            values = _take(
                batch.values, batch.kv_dtype, heads, batch.v_scale, head_dim, head_axis=0
            )
            keys, values = (x.reshape(kv_heads, block, head_dim) for x in (keys, values))
            key = j * block + slot
            # Slots that no token sees may hold NaN, and 0 * NaN is NaN.
            written = (key >= low) & (key < length)
            values = jnp.where(written[None, :, None], values, 0.0)
            seen = key[None, :] <= places
            if options.window is not None:
                seen &= key[None, :] > places - options.window
            scores = jnp.einsum("kmd,kcd->kmc", query, keys, precision="highest")
            return _fold(state, _mask(scores, seen[None], options), values)

        state = lax.fori_loop(low // block, place[-1] // block + 1, columns, _fresh(query.shape))
        state = _Softmax(
            *(
                jnp.moveaxis(x.reshape(kv_heads, group, num_tokens, *x.shape[2:]), 2, 0)
                for x in state
            )
        )
        return tuple(
            lax.dynamic_update_slice_in_dim(x, _keep(live, y), first, axis=0)
            for x, y in zip(results, _finish(state, batch.sinks, options), strict=True)
        )

    return lax.fori_loop(0, (end - begin + num_tokens - 1) // num_tokens, tile, results)


def _fold(state, scores, values):
    """Add a block of keys, by their masked scores f32[K, M, C] and values f32[K, C, D]."""
    top = jnp.maximum(state.top, jnp.max(scores, axis=-1))
    # A token that has seen no key yet (a window) has top NEG and weighs them all by 1; its first
    # seen key makes `fade` 0, which takes that back.
    weights = jnp.exp(scores - top[..., None])
    fade = jnp.exp(state.top - top)
    product = jnp.einsum("kmc,kcd->kmd", weights, values, precision="highest")
    return _Softmax(
        top,
        state.total * fade + jnp.sum(weights, axis=-1),
        state.acc * fade[..., None] + product,
    )


def _take(pool, dtype, rows, scale, head_dim, head_axis=1):
    """Rows of a flat pool [N*K, page*D] as f32[*rows.shape, page, D], scaled by head if 8-bit."""
    taken = pool.at[rows].get(mode="promise_in_bounds")
    taken = as_type(taken, dtype).astype(jnp.float32)
    taken = taken.reshape(*rows.shape, -1, head_dim)
    if scale is None:
        return taken
    shape = [1, 1, 1, 1]
    shape[head_axis] = -1
    return taken * scale.reshape(shape)


def _mask(scores, seen, options):
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    return jnp.where(seen, scores, NEG)


def _fresh(shape):
    """A softmax f32[*shape[:-1]] with values of shape[-1] that has seen nothing."""
    return _Softmax(
        jnp.full(shape[:-1], NEG, jnp.float32),
        jnp.zeros(shape[:-1], jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def _finish(state, sinks, options):
    """(out f32[n, K, G, D], lse f32[n, K, G] if asked for); zeros where nothing was seen."""
    top, total, acc = state
    some = total > 0
    if sinks is not None:
        highest = jnp.maximum(top, sinks[None])
        fade = jnp.exp(top - highest)
        total, acc = total * fade + jnp.exp(sinks[None] - highest), acc * fade[..., None]
        top = highest
    total = jnp.where(some, total, 1.0)
    out = acc / total[..., None]
    return (out, jnp.where(some, top + jnp.log(total), 0.0)) if options.return_lse else (out,)


def _keep(live, x):
    """x [n, ..] with zeros where not live bool[n]."""
    return jnp.where(live.reshape(-1, *(1,) * (x.ndim - 1)), x, 0.0)


def _pad(x, n):
    """n zeros behind the first axis."""
    return jnp.pad(x, ((0, n), *((0, 0),) * (x.ndim - 1)))
