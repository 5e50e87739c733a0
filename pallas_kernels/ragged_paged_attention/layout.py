"""KVPages: one layer's pool of KV pages, opaque to everyone but the backend that reads it.

Made by the device layer (one per transformer layer), written by every backend through `write`,
moved by tiers and tests through `gather` / `scatter`, which speak one canonical page format
whatever the physical layout:

    canonical pages [n, K, 2, page, D]     [:, :, 0] keys, [:, :, 1] values

Page 0 is the null page: padding tokens write there, and nothing may depend on what it holds. The KV
head is axis 1 of every array of every layout, and the axis to shard.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Layout(NamedTuple):
    """The five things that differ between physical layouts.

    Args:
        shapes: (num_pages, K, page, D) -> the shape of each array of the pool.
        to_canonical: arrays of n pages -> canonical pages [n, K, 2, page, D].
        from_canonical: the inverse.
        write: (arrays, page_ids i32[T], offsets i32[T], k [T, K, D], v [T, K, D]) -> arrays.
    """

    shapes: Callable[[int, int, int, int], tuple[tuple[int, ...], ...]]
    to_canonical: Callable[[tuple[jax.Array, ...]], jax.Array]
    from_canonical: Callable[[jax.Array], tuple[jax.Array, ...]]
    write: Callable[..., tuple[jax.Array, ...]]


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


LAYOUTS = {
    "head_major": Layout(
        shapes=lambda n, k, page, d: ((n, k, 2, page, d),),
        to_canonical=lambda data: data[0],
        from_canonical=lambda pages: (pages,),
        write=_write_head_major,
    ),
    "split": Layout(
        shapes=lambda n, k, page, d: ((n, k, page, d),) * 2,
        to_canonical=lambda data: jnp.stack(data, axis=2),
        from_canonical=lambda pages: (pages[:, :, 0], pages[:, :, 1]),
        write=_write_split,
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
    """

    data: tuple[Any, ...]
    layout: str = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})
    num_kv_heads: int = dataclasses.field(metadata={"static": True})
    head_dim: int = dataclasses.field(metadata={"static": True})

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
            ValueError: an unknown layout.
        """
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r}: no such page layout; known: {', '.join(LAYOUTS)}")
        shapes = LAYOUTS[layout].shapes(num_pages, num_kv_heads, page_size, head_dim)
        data = tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes)
        return cls(data, layout, page_size, num_kv_heads, head_dim)

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

    @property
    def dtype(self):
        """Element type of the pool."""
        return self.data[0].dtype

    def gather(self, page_ids: jax.Array) -> jax.Array:
        """Copy pages out in the canonical format.

        Args:
            page_ids: i32[n], each in [0, num_pages).

        Returns:
            [n, K, 2, page, D] of the pool's dtype.
        """
        taken = tuple(a.at[page_ids].get(mode="promise_in_bounds") for a in self.data)
        return LAYOUTS[self.layout].to_canonical(taken)

    def scatter(self, page_ids: jax.Array, pages: jax.Array) -> "KVPages":
        """Overwrite whole pages.

        Args:
            page_ids: i32[n], each in [0, num_pages); may repeat only for pages whose content does not matter.
            pages: [n, K, 2, page, D] canonical, of the pool's dtype.

        Returns:
            The pool with those pages replaced; in place when the caller donates it.
        """
        parts = LAYOUTS[self.layout].from_canonical(pages)
        data = tuple(
            a.at[page_ids].set(part, mode="promise_in_bounds")
            for a, part in zip(self.data, parts, strict=True)
        )
        return dataclasses.replace(self, data=data)


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


def write(kv: KVPages, k_new, v_new, kv_lens, page_table, kv_starts, cu_q_lens, k_scale, v_scale):
    """Write the new tokens' keys and values into their pages.

    Slots are derived here and nowhere else. Padding tokens write to the null page.

    Args:
        kv: the pool.
        k_new, v_new: [T, K, D].
        kv_lens: i32[S]. page_table: i32[S*P]. kv_starts: i32[S]. cu_q_lens: i32[S+1].
        k_scale, v_scale: f32[K] for an 8-bit pool, else None.

    Returns:
        The pool with those slots written; nothing else changes but the null page.
    """
    num_tokens = k_new.shape[0]
    places = token_places(num_tokens, kv_lens, cu_q_lens)
    pages_per_row = page_table.shape[0] // kv_lens.shape[0]
    index = places.position - kv_starts[places.row]  # token's place in its row's pages
    index = jnp.clip(index, 0, pages_per_row * kv.page_size - 1)
    page_ids = page_table[places.row * pages_per_row + index // kv.page_size]
    page_ids = jnp.where(places.live, page_ids, 0)
    k = encode(k_new, kv.dtype, k_scale)
    v = encode(v_new, kv.dtype, v_scale)
    data = LAYOUTS[kv.layout].write(kv.data, page_ids, index % kv.page_size, k, v)
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
