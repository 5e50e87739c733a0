"""Which tokens top_k, top_p and min_p leave, each of what the one before it left.

Called by `processors.drawn_from`. What no row asks for costs nothing: without top_k and top_p nothing is
searched.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def keep_mask(
    scaled: Float[Array, "R V"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    min_p: Float[Array, " R"],
) -> Bool[Array, "R V"]:
    """Which tokens a row may draw; the most likely one always stays, and ties with the last one
    kept stay too.

    Args:
        scaled: f32[R, V], logits after temperature.
        top_k: i32[R], 0 = all. top_p: f32[R]. min_p: f32[R].

    Returns:
        bool[R, V].
    """
    floor = jax.lax.cond(
        jnp.any((top_k > 0) | (top_p < 1)),
        _floor,
        lambda scaled, *_: jnp.full(scaled.shape[0], -jnp.inf, scaled.dtype),
        scaled,
        top_k,
        top_p,
    )
    top = jnp.max(scaled, axis=1)
    # p(token) >= min_p * p(top)  <=>  logit >= top + log(min_p)
    min_p_floor = jnp.where(min_p > 0, top + jnp.log(jnp.maximum(min_p, 1e-38)), -jnp.inf)
    return scaled >= jnp.minimum(jnp.maximum(floor, min_p_floor), top)[:, None]


def _floor(
    scaled: Float[Array, "R V"], top_k: Int[Array, " R"], top_p: Float[Array, " R"]
) -> Float[Array, " R"]:
    """The smallest logit that top_k and then top_p leave, per row; -inf for rows that ask for
    neither.

    Nothing is sorted: how far below the largest logit a token may lie is searched bit by bit, which
    reads the logits 31 times and takes a tenth of the time of a sort on CPU.
    """
    vocab_size = scaled.shape[1]
    # Floats from 0 up are ordered as their bits are.
    depths = jax.lax.bitcast_convert_type(jnp.abs(scaled), jnp.int32)
    count = jnp.where(top_k > 0, jnp.minimum(top_k, vocab_size), vocab_size)  # i32[R]

    def within(depth: jax.Array) -> jax.Array:
        return depths <= depth[:, None]

    def search_k() -> jax.Array:
        return _smallest_depth(
            lambda depth: jnp.sum(within(depth).astype(jnp.int32), axis=1) >= count, len(count)
        )

    def search_p(by_k: jax.Array) -> jax.Array:
        weights = jnp.exp(scaled)
        above = depths < by_k[:, None]
        # Of equals in the last place, only as many weigh as top_k has room for.
        num_last = count - jnp.sum(above.astype(jnp.int32), axis=1)
        last = jnp.exp(-jax.lax.bitcast_convert_type(by_k, jnp.float32))
        total = jnp.sum(jnp.where(above, weights, 0.0), axis=1)
        total = total + jnp.where(num_last > 0, num_last.astype(jnp.float32) * last, 0.0)
        # The smallest set whose mass reaches top_p.
        by_p = _smallest_depth(
            lambda depth: jnp.sum(jnp.where(within(depth), weights, 0.0), axis=1) >= top_p * total,
            len(count),
        )
        return jnp.where(top_p < 1, jnp.minimum(by_p, by_k), by_k)

    by_k = jax.lax.cond(jnp.any(top_k > 0), search_k, lambda: jnp.max(depths, axis=1))
    deepest = jax.lax.cond(jnp.any(top_p < 1), search_p, lambda by_k: by_k, by_k)
    floor = -jax.lax.bitcast_convert_type(deepest, jnp.float32)
    return jnp.where((top_k > 0) | (top_p < 1), floor, -jnp.inf)


def _smallest_depth(reaches: Callable[[jax.Array], jax.Array], num_rows: int) -> jax.Array:
    """i32[R], the smallest number from 0 up at which `reaches`, monotonous, is true for a row."""

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        reached = reaches(middle)
        return jnp.where(reached, low, middle + 1), jnp.where(reached, middle, high)

    low = jnp.zeros(num_rows, jnp.int32)
    high = jnp.full(num_rows, jnp.iinfo(jnp.int32).max, jnp.int32)
    return jax.lax.fori_loop(0, 31, halve, (low, high))[1]
