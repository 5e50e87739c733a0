"""Draws one token per row of logits.

Order: temperature, then top_k, top_p and min_p, each on what the one before it left. Rows never
affect each other: every row has its own key, folded with its output position, and a row's result
does not depend on which branch the other rows made the batch take. What no row asks for costs
nothing: greedy batches draw no noise, and batches without top_k and top_p sort nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

NEVER = -1e30  # finite, so that arithmetic on masked logits stays free of NaN


class SamplingRows(NamedTuple):
    """What each row asks for; all traced, so no value triggers a compilation."""

    temperature: Float[Array, " R"]  # 0 = greedy
    top_k: Int[Array, " R"]  # 0 = all
    top_p: Float[Array, " R"]  # (0, 1]
    min_p: Float[Array, " R"]  # [0, 1]
    seeds: UInt32[Array, "R 2"]  # high and low word
    output_positions: Int[Array, " R"]


def sample(logits: Float[Array, "R V"], rows: SamplingRows) -> Int[Array, " R"]:
    """One token id per row.

    Args:
        logits: f32[R, V], raw.
        rows: each row's parameters.

    Returns:
        i32[R]: the argmax where temperature is 0, else a draw that depends on the row's logits,
        parameters, seed and output position alone.
    """
    greedy = jnp.argmax(logits, axis=1).astype(jnp.int32)
    is_greedy = rows.temperature <= 0

    def draw(logits: jax.Array) -> jax.Array:
        # The largest logit becomes exactly 0, so a tiny temperature cannot produce inf - inf.
        shifted = logits - jnp.max(logits, axis=1, keepdims=True)
        scaled = shifted / jnp.where(is_greedy, 1.0, rows.temperature)[:, None]
        kept = keep_mask(scaled, rows.top_k, rows.top_p, rows.min_p)
        noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(
            rows.seeds, rows.output_positions, logits.shape[1]
        )
        drawn = jnp.argmax(jnp.where(kept, scaled + noise, NEVER), axis=1)
        return jnp.where(is_greedy, greedy, drawn.astype(jnp.int32))

    return jax.lax.cond(jnp.all(is_greedy), lambda _: greedy, draw, logits)


def _gumbel(seed: UInt32[Array, " 2"], position: Int[Array, ""], size: int) -> Float[Array, " V"]:
    """Noise f32[V] whose argmax with log-probabilities is a draw (the Gumbel-max trick)."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (size,), jnp.float32)


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
    needs_sort = jnp.any((top_k > 0) | (top_p < 1))
    floor = jax.lax.cond(
        needs_sort,
        _sorted_floor,
        lambda scaled, *_: jnp.full(scaled.shape[0], -jnp.inf, scaled.dtype),
        scaled,
        top_k,
        top_p,
    )
    top = jnp.max(scaled, axis=1)
    # p(token) >= min_p * p(top)  <=>  logit >= top + log(min_p)
    min_p_floor = jnp.where(min_p > 0, top + jnp.log(jnp.maximum(min_p, 1e-38)), -jnp.inf)
    return scaled >= jnp.minimum(jnp.maximum(floor, min_p_floor), top)[:, None]


def _sorted_floor(
    scaled: Float[Array, "R V"], top_k: Int[Array, " R"], top_p: Float[Array, " R"]
) -> Float[Array, " R"]:
    """The smallest logit that top_k and then top_p leave, per row; -inf for rows that ask for
    neither.
    """
    vocab_size = scaled.shape[1]
    descending = -jnp.sort(-scaled, axis=1)
    count = jnp.where(top_k > 0, jnp.minimum(top_k, vocab_size), vocab_size)  # i32[R]
    rank = jnp.arange(vocab_size, dtype=jnp.int32)
    by_k = jnp.take_along_axis(descending, (count - 1)[:, None], axis=1)[:, 0]
    probs = jax.nn.softmax(jnp.where(rank[None, :] < count[:, None], descending, NEVER), axis=1)
    # A token stays while the mass before it is below top_p: the smallest set that reaches it.
    before = jnp.cumsum(probs, axis=1) - probs
    num_kept = jnp.sum((before < top_p[:, None]).astype(jnp.int32), axis=1)
    num_kept = jnp.clip(num_kept, 1, count)
    by_p = jnp.take_along_axis(descending, (num_kept - 1)[:, None], axis=1)[:, 0]
    floor = jnp.where(top_p < 1, by_p, by_k)
    return jnp.where((top_k > 0) | (top_p < 1), floor, -jnp.inf)
