"""Log-probabilities in float32 from raw logits: before temperature, top-k and the like."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def chosen_logprobs(logits: Float[Array, "R V"], token_ids: Int[Array, " R"]) -> Float[Array, " R"]:
    """Natural-log probability of one token per row.

    Args:
        logits: f32[R, V], raw.
        token_ids: i32[R].

    Returns:
        f32[R].
    """
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=1)
