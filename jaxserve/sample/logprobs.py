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


def top_logprobs(
    logits: Float[Array, "R V"], count: int
) -> tuple[Int[Array, "R K"], Float[Array, "R K"]]:
    """The likeliest tokens of each row, best first; of equals the lower id first.

    Args:
        logits: f32[R, V], raw.
        count: K <= V, static.

    Returns:
        (token ids i32[R, K], their natural-log probabilities f32[R, K], as `chosen_logprobs` has
        them).
    """
    top, token_ids = jax.lax.top_k(logits, count)
    return token_ids, top - jax.nn.logsumexp(logits, axis=1, keepdims=True)
