"""KVPages: one layer's pool of KV pages, opaque to everyone but the backend that reads it.

Made by the device layer (one per transformer layer), written by every backend through `write`,
moved by tiers and tests through `gather` / `scatter`, which speak one canonical page format
whatever the physical layout:

    canonical pages [n, K, 2, page, D]     [:, :, 0] keys, [:, :, 1] values

Page 0 is the null page: padding tokens write there, and nothing may depend on what it holds. The KV
head is the axis to shard: axis 1 of every array, except in layout "tpu".

Layout "tpu" is [N, page, words, pack, 128]. A token's keys and values are rows of 128 lanes, and
`pack` of them (4 / itemsize) share a row of 32-bit words:

    D = 64    k0|v0  k1|v1  ..              key and value side by side on the lanes
    D = 128   k0  v0  k1  v1  ..
    D = 256   k0[:128]  k0[128:]  v0[:128]  v0[128:]  k1[:128]  ..

Rows that fill the last word are zero. The split in (words, pack) is the form that XLA and Mosaic
tile alike; with one axis of words * pack rows XLA copies the whole pool at each kernel call. `page`
is no tiled axis, so a DMA may start at any token and take any number of them. Heads are sharded on
the axis of words, where each shard's rows fill whole words.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.float8 import as_bytes, as_type, is_float8
from pallas_kernels.page_bytes import TPU_LANES, tpu_words
from pallas_kernels.ragged_paged_attention.call import Rows, Scales


class Layout(NamedTuple):
    """The things that differ between physical layouts.

    Args:
        shapes: (num_pages, K, page, D, itemsize) -> the shape of each array of the pool.
        to_canonical: (arrays of n pages, K, D) -> canonical pages [n, K, 2, page, D].
        from_canonical: canonical pages -> arrays of n pages.
        write: (arrays, page_ids i32[T], offsets i32[T], k [T, K, D], v [T, K, D]) -> arrays.
        as_bytes: whether 8-bit floats are held as uint8. XLA for CPU converts a whole array of them
            where one slot is written.
    """

    shapes: Callable[[int, int, int, int, int], tuple[tuple[int, ...], ...]]
    to_canonical: Callable[[tuple[jax.Array, ...], int, int], jax.Array]
    from_canonical: Callable[[jax.Array], tuple[jax.Array, ...]]
    write: Callable[..., tuple[jax.Array, ...]]
    as_bytes: bool = False


def _write_head_major(data, page_ids, offsets, k, v):
    (pool,) = data
    both = jnp.stack([k, v], axis=2)  # [T, K, 2, D]
    return (pool.at[page_ids, :, :, offsets].set(both, mode="promise_in_bounds"),)


def _write_split(data, page_ids, offsets, k, v):
    keys, values = data
    return (
        keys.at[page_ids, :, offsets].set(k, mode="promise_in_bounds"),
        values.at[page_ids, :, offsets].set(v, mode="promise_in_bounds"),
    )


def pack_tpu_rows(k: jax.Array, v: jax.Array) -> jax.Array:
    """Keys and values of tokens, [.., K, D] each -> [.., words, pack, 128] as layout tpu has them."""
    *lead, kv_heads, head_dim = k.shape
    words, pack = tpu_words(kv_heads, head_dim, k.dtype.itemsize)
    rows = jnp.concatenate([k, v], axis=-1).reshape(*lead, -1, TPU_LANES)
    filler = words * pack - rows.shape[-2]
    rows = jnp.pad(rows, [(0, 0)] * len(lead) + [(0, filler), (0, 0)])
    return rows.reshape(*lead, words, pack, TPU_LANES)


def _tpu_to_canonical(data, kv_heads, head_dim):
    (pool,) = data  # [n, page, words, pack, 128]
    count, page = pool.shape[:2]
    rows = pool.reshape(count, page, -1, TPU_LANES)[:, :, : 2 * kv_heads * head_dim // TPU_LANES]
    return rows.reshape(count, page, kv_heads, 2, head_dim).transpose(0, 2, 3, 1, 4)


def _tpu_from_canonical(pages):
    by_token = pages.transpose(2, 0, 3, 1, 4)  # [2, n, page, K, D]
    return (pack_tpu_rows(by_token[0], by_token[1]),)


def _write_tpu(data, page_ids, offsets, k, v):
    (pool,) = data
    return (pool.at[page_ids, offsets].set(pack_tpu_rows(k, v), mode="promise_in_bounds"),)


LAYOUTS = {
    "head_major": Layout(
        shapes=lambda n, k, page, d, itemsize: ((n, k, 2, page, d),),
        to_canonical=lambda data, k, d: data[0],
        from_canonical=lambda pages: (pages,),
        write=_write_head_major,
    ),
    "split": Layout(
        shapes=lambda n, k, page, d, itemsize: ((n, k, page, d),) * 2,
        to_canonical=lambda data, k, d: jnp.stack(data, axis=2),
        from_canonical=lambda pages: (pages[:, :, 0], pages[:, :, 1]),
        write=_write_split,
        as_bytes=True,
    ),
    "tpu": Layout(
        shapes=lambda n, k, page, d, itemsize: ((n, page, *tpu_words(k, d, itemsize), TPU_LANES),),
        to_canonical=_tpu_to_canonical,
        from_canonical=_tpu_from_canonical,
        write=_write_tpu,
    ),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPages:
    """The KV pages of one layer: a pytree whose leaves are `data`; everything else is static.

    Args:
        data: the pool's arrays, in the shapes of `LAYOUTS[layout]`.
        layout: a key of LAYOUTS.
        page_size: tokens a page.
        num_kv_heads: K.
        head_dim: D.
        dtype: element type; the arrays may hold it as bytes.
    """

    data: tuple[Any, ...]
    layout: str = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})
    num_kv_heads: int = dataclasses.field(metadata={"static": True})
    head_dim: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def abstract(
        cls, layout: str, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype
    ) -> "KVPages":
        """The pool as shapes and dtypes only, for compiling ahead of time.

        Args:
            layout: a key of LAYOUTS (`dispatch.layout_of(backend)`).
            num_pages: pages in all, the null page included.
            page_size: tokens a page.
            num_kv_heads: K.
            head_dim: D.
            dtype: element type of the pool.

        Returns:
            KVPages whose `data` are `jax.ShapeDtypeStruct`.

        Raises:
            ValueError: an unknown layout, or a head_dim that it does not hold.
        """
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r}: no such page layout; known: {', '.join(LAYOUTS)}")
        dtype = jnp.dtype(dtype)
        shapes = LAYOUTS[layout].shapes(
            num_pages, num_kv_heads, page_size, head_dim, dtype.itemsize
        )
        stored = jnp.dtype("uint8") if LAYOUTS[layout].as_bytes and is_float8(dtype) else dtype
        data = tuple(jax.ShapeDtypeStruct(shape, stored) for shape in shapes)
        return cls(data, layout, page_size, num_kv_heads, head_dim, dtype)

    @classmethod
    def zeros(
        cls, layout: str, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype
    ) -> "KVPages":
        """A pool of zeros on the default device. Arguments and errors as `abstract`."""
        shape = cls.abstract(layout, num_pages, page_size, num_kv_heads, head_dim, dtype)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)

    @property
    def num_pages(self) -> int:
        """Pages in the pool, the null page included."""
        return self.data[0].shape[0]

    def gather(self, page_ids: jax.Array) -> jax.Array:
        """Copy pages out in the canonical format.

        Args:
            page_ids: i32[n], each in [0, num_pages).

        Returns:
            [n, K, 2, page, D] of the pool's dtype.
        """
        taken = tuple(a.at[page_ids].get(mode="promise_in_bounds") for a in self.data)
        pages = LAYOUTS[self.layout].to_canonical(taken, self.num_kv_heads, self.head_dim)
        return as_type(pages, self.dtype) if self._holds_bytes else pages

    def scatter(self, page_ids: jax.Array, pages: jax.Array) -> "KVPages":
        """Overwrite whole pages.

        Args:
            page_ids: i32[n], each in [0, num_pages); may repeat only for pages whose content does not matter.
            pages: [n, K, 2, page, D] canonical, of the pool's dtype.

        Returns:
            The pool with those pages replaced; in place when the caller donates it.
        """
        parts = LAYOUTS[self.layout].from_canonical(as_bytes(pages) if self._holds_bytes else pages)
        data = tuple(
            a.at[page_ids].set(part, mode="promise_in_bounds")
            for a, part in zip(self.data, parts, strict=True)
        )
        return dataclasses.replace(self, data=data)

    @property
    def _holds_bytes(self) -> bool:
        return self.data[0].dtype != self.dtype


class TokenPlaces(NamedTuple):
    """Where each packed token stands; one entry per token, padding included."""

    row: jax.Array  # i32[T] row of the batch; S - 1 at most, meaningless where not live
    position: jax.Array  # i32[T] absolute position in the sequence
    live: jax.Array  # bool[T] False for padding tokens


def token_places(num_tokens: int, kv_lens, cu_q_lens) -> TokenPlaces:
    """Row and absolute position of every packed token.

    Args:
        num_tokens: T, static.
        kv_lens: i32[S] context length including the new tokens.
        cu_q_lens: i32[S+1] cumulative token counts; padded rows repeat the last value.
    """
    token = jnp.arange(num_tokens, dtype=jnp.int32)  # i32[T]
    num_rows = kv_lens.shape[0]
    # Rows that end at or before the token lie before it: a count, so zero-token rows are skipped.
    row = jnp.sum((cu_q_lens[None, 1:] <= token[:, None]).astype(jnp.int32), axis=1)
    row = jnp.minimum(row, num_rows - 1)
    position = kv_lens[row] - (cu_q_lens[row + 1] - token)
    return TokenPlaces(row, position, token < cu_q_lens[-1])


def token_slots(num_tokens: int, page_size: int, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """The slot that each packed token is written to; a padding token's is in the null page.

    Slots are derived here and nowhere else.

    Args:
        num_tokens: T, static.
        page_size: tokens a page.
        rows: where each row stands.

    Returns:
        (page ids i32[T], places in the page i32[T]).
    """
    places = token_places(num_tokens, rows.kv_lens, rows.cu_q_lens)
    pages_per_row = rows.page_table.shape[0] // rows.kv_lens.shape[0]
    index = places.position - rows.kv_starts[places.row]  # token's place in its row's pages
    index = jnp.clip(index, 0, pages_per_row * page_size - 1)
    page_ids = rows.page_table[places.row * pages_per_row + index // page_size]
    return jnp.where(places.live, page_ids, 0), index % page_size


def write(kv: KVPages, k_new, v_new, rows: Rows, scales: Scales) -> KVPages:
    """Write the new tokens' keys and values into their pages.

    Padding tokens write to the null page.

    Args:
        kv: the pool.
        k_new, v_new: [T, K, D].
        rows: where each row stands.
        scales: of an 8-bit pool.

    Returns:
        The pool with those slots written; nothing else changes but the null page.
    """
    page_ids, offsets = token_slots(k_new.shape[0], kv.page_size, rows)
    k = encode(k_new, kv.dtype, scales.k)
    v = encode(v_new, kv.dtype, scales.v)
    if LAYOUTS[kv.layout].as_bytes:
        k, v = as_bytes((k, v))
    data = LAYOUTS[kv.layout].write(kv.data, page_ids, offsets, k, v)
    return dataclasses.replace(kv, data=data)


def is_8bit(dtype) -> bool:
    """Whether pools of this dtype need k_scale and v_scale."""
    return jnp.dtype(dtype).itemsize == 1


def encode(x, dtype, scale):
    """Cast new keys or values [T, K, D] to the pool's dtype, dividing by scale f32[K] if it is 8-bit."""
    if scale is None:
        return x.astype(dtype)
    y = x.astype(jnp.float32) / scale[None, :, None]
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return jnp.clip(jnp.round(y), info.min, info.max).astype(dtype)
    # Saturate: e4m3fn has no infinity, so a value beyond the range would become NaN.
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(y, -limit, limit).astype(dtype)
