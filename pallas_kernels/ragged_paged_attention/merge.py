"""Merge attention over two parts of the keys into attention over both.

Called by whoever splits a row's keys: split-KV, a shared prefix, streamed segments. Invariant: a
part without keys (lse = -inf) adds nothing, whatever its output holds, NaN included.
"""

import jax
import jax.numpy as jnp


def merge_attention_states(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over keys A and B from attention over each.

    It is associative and symmetric to rounding. Weights and sums are f32. A sink must stand in one
    of the parts only.

    Args:
        out_a, out_b: [.., D], one dtype; the softmax-weighted mean of each part's values.
        lse_a, lse_b: f32[..], log of each part's softmax denominator; -inf for a part without keys.

    Returns:
        (out [.., D] of that dtype, lse f32[..]). Where both parts are empty: zeros and -inf.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: partial results merged by their log-sum-exp, "Flash-Decoding", Dao et al. 2023.
    """
    if out_a.shape != out_b.shape or out_a.dtype != out_b.dtype:
        raise ValueError(
            f"out_b: {out_b.dtype}{list(out_b.shape)}, "
            f"expected {out_a.dtype}{list(out_a.shape)} as out_a"
        )
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.shape != out_a.shape[:-1] or lse.dtype != jnp.float32:
            raise ValueError(
                f"{name}: {lse.dtype}{list(lse.shape)}, expected float32{list(out_a.shape[:-1])}"
            )
    top = jnp.maximum(lse_a, lse_b)
    top = jnp.where(top == -jnp.inf, 0.0, top)  # -inf - -inf is NaN
    weight_a, weight_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    total = weight_a + weight_b
    empty = total == 0
    divisor = jnp.where(empty, 1.0, total)
    out = _weighted(out_a, weight_a / divisor) + _weighted(out_b, weight_b / divisor)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(divisor))
    return out.astype(out_a.dtype), lse


def _weighted(out, weight):
    """f32: out * weight, and 0 where the weight is 0, even of NaN."""
    weight = weight[..., None]
    return jnp.where(weight == 0, 0.0, out.astype(jnp.float32) * weight)
