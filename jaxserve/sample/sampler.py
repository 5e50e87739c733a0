"""Draws one token per row of processed logits.

Rows never affect each other: every row has its own key, folded with its output position, and a row's
result does not depend on which branch the other rows made the batch take. What no row asks for costs
nothing: greedy batches draw no noise. What comes before a draw stands in `processors`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxserve.sample.processors import SamplingRows, drawn_from


def sample(logits: Float[Array, "R V"], rows: SamplingRows) -> Int[Array, " R"]:
    """One token id per row.

    Args:
        logits: f32[R, V], processed.
        rows: each row's parameters.

    Returns:
        i32[R]: the argmax where temperature is 0, else a draw that depends on the row's logits,
        parameters, seed and output position alone.
    """
    greedy = _argmax(logits)
    is_greedy = rows.temperature <= 0

    def draw(logits: jax.Array) -> jax.Array:
        noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(
            rows.seeds, rows.output_positions, logits.shape[1]
        )
        return jnp.where(is_greedy, greedy, _argmax(drawn_from(logits, rows) + noise))

    return jax.lax.cond(jnp.all(is_greedy), lambda _: greedy, draw, logits)


def _argmax(values: Float[Array, "R V"]) -> Int[Array, " R"]:
    """The first of each row's largest, in [0, V) also where values are NaN.

    As two reductions, which XLA's CPU backend makes of vectors; `jnp.argmax` it does not.
    """
    largest = jnp.max(values, axis=1, keepdims=True)
    ids = jnp.arange(values.shape[1], dtype=jnp.int32)[None, :]
    first = jnp.min(jnp.where(values == largest, ids, values.shape[1]), axis=1)
    return jnp.minimum(first, values.shape[1] - 1)


def _gumbel(seed: UInt32[Array, " 2"], position: Int[Array, ""], size: int) -> Float[Array, " V"]:
    """Noise f32[V] whose argmax with log-probabilities is a draw (the Gumbel-max trick)."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (size,), jnp.float32)
