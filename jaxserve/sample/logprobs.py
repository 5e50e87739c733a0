"""Log-probabilities in float32 from raw logits: before temperature, top-k and the like.

What leaves here is never -inf: a token that is ruled out has `LEAST_LOGPROB`, so that every value is
a number in JSON and sums stay finite.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LEAST_LOGPROB = -9999.0  # as in the OpenAI API


def chosen_logprobs(logits: Float[Array, "R V"], token_ids: Int[Array, " R"]) -> Float[Array, " R"]:
    """Natural-log probability of one token per row.

    Args:
        logits: f32[R, V], raw; -inf where a token is ruled out.
        token_ids: i32[R].

    Returns:
        f32[R], at least LEAST_LOGPROB.
    """
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0]
    return jnp.maximum(chosen - jax.nn.logsumexp(logits, axis=1), LEAST_LOGPROB)


def top_logprobs(
    logits: Float[Array, "R V"], count: int
) -> tuple[Int[Array, "R K"], Float[Array, "R K"]]:
    """The likeliest tokens of each row, best first; of equals the lower id first.

    Args:
        logits: f32[R, V], raw; -inf where a token is ruled out.
        count: K <= V, static.

    Returns:
        (token ids i32[R, K], their natural-log probabilities f32[R, K], as `chosen_logprobs` has
        them).
    """
    top, token_ids = jax.lax.top_k(logits, count)
    normaliser = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    return token_ids, jnp.maximum(top - normaliser, LEAST_LOGPROB)


class TargetScores(NamedTuple):
    """How likely given tokens were, one per row."""

    logprobs: Float[Array, " R"]  # natural logs, at least LEAST_LOGPROB
    ranks: Int[Array, " R"]  # 1 + how many tokens are likelier: 1 is the likeliest
    top_ids: Int[Array, "R K"] | None = None  # the likeliest tokens, best first, if asked for
    top_logprobs: Float[Array, "R K"] | None = None


def score_targets(
    logits: Float[Array, "R V"], targets: Int[Array, " R"], num_top: int
) -> TargetScores:
    """Scores one given token per row.

    Args:
        logits: f32[R, V], raw; -inf where a token is ruled out.
        targets: i32[R].
        num_top: K <= V, static; 0 = no likeliest tokens.
    """
    of_targets = jnp.take_along_axis(logits, targets[:, None], axis=1)
    ranks = 1 + jnp.sum((logits > of_targets).astype(jnp.int32), axis=1)
    scores = TargetScores(chosen_logprobs(logits, targets), ranks)
    if not num_top:
        return scores
    ids, logprobs = top_logprobs(logits, num_top)
    return scores._replace(top_ids=ids, top_logprobs=logprobs)
