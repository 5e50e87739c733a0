"""What a row's options do to its logits, in their order:

    program    step                                        where
    head       padded rows of the vocabulary: -inf         `without_padding`
    process    1 repetition penalty                        `process`, called only where a row of the
               2 frequency and presence penalty             batch has one of these
               3 logit_bias
               4 masks
    sample     5 temperature                               `drawn_from`; greedy rows take the argmax
               6 top_k   7 top_p   8 min_p                  of what came before

This is the order of transformers. Log-probabilities are of the raw logits, as `head` gives them, or, for
a row that asks for it, of what it is sampled from (`reported`).

Invariant: each row is computed from its own parts alone, and an option at its default changes no bit
of a row, so neighbours and the programs that they make the batch take do not matter. Every row keeps a
token whose logit is finite.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.sample.filters import keep_mask

NEVER = -jnp.inf  # the logit of what cannot be sampled


class SamplingRows(NamedTuple):
    """How each row is drawn; all traced, so no value triggers a compilation."""

    temperature: Float[Array, " R"]  # 0 = greedy
    top_k: Int[Array, " R"]  # 0 = all
    top_p: Float[Array, " R"]  # (0, 1]
    min_p: Float[Array, " R"]  # [0, 1]
    seeds: UInt32[Array, "R 2"]  # high and low word
    output_positions: Int[Array, " R"]
    reports_processed: Bool[Array, " R"]  # logprobs of what is sampled from, not of raw logits


def without_padding(logits: Float[Array, "R V"], num_token_ids: int) -> Float[Array, "R V"]:
    """Logits with -inf for the rows of the head that stand for no token.

    Args:
        logits: f32[R, V].
        num_token_ids: ids from here on are padding; static.
    """
    vocab_size = logits.shape[1]
    if num_token_ids >= vocab_size:
        return logits
    return jnp.where(jnp.arange(vocab_size)[None, :] < num_token_ids, logits, NEVER)


def drawn_from(logits: Float[Array, "R V"], rows: SamplingRows) -> Float[Array, "R V"]:
    """Logits that rows are drawn from: after temperature, top_k, top_p and min_p; the largest is 0.

    Args:
        logits: f32[R, V], processed.
        rows: each row's parameters. A greedy row comes back shifted and otherwise as it was.
    """
    # The largest logit becomes exactly 0, so a tiny temperature cannot produce inf - inf.
    shifted = logits - jnp.max(logits, axis=1, keepdims=True)
    is_greedy = (rows.temperature <= 0)[:, None]
    scaled = shifted / jnp.where(is_greedy, 1.0, rows.temperature[:, None])
    kept = keep_mask(scaled, rows.top_k, rows.top_p, rows.min_p)
    return jnp.where(kept | is_greedy, scaled, NEVER)


def reported(
    raw: Float[Array, "R V"], processed: Float[Array, "R V"], rows: SamplingRows
) -> Float[Array, "R V"]:
    """The logits whose log-softmax each row reports: the raw ones, or those that it is drawn from.

    Args:
        raw, processed: f32[R, V], before and after `process`.
        rows: each row's parameters.
    """
    return jnp.where(rows.reports_processed[:, None], drawn_from(processed, rows), raw)
