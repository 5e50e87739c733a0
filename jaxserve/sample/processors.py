"""What a row's options do to its logits, in their order:

    program    step                                        where
    head       padded rows of the vocabulary: -inf         `without_padding`
    process    1 repetition penalty                        `process`, called only where a row of the
               2 frequency and presence penalty             batch has one of these
               3 logit_bias
               4 masks
    sample     5 temperature                               `drawn_from`; greedy rows take the argmax
               6 top_k   7 top_p   8 min_p                  of what came before

This is the order of transformers, but that it adds a bias before the penalties. Log-probabilities are of
the raw logits, as `head` gives them, or, for a row that asks for it, of what it is sampled from (`reported`).

Invariant: each row is computed from its own parts alone, and an option at its default changes no bit
of a row, so neighbours and the programs that they make the batch take do not matter. Every row keeps a
token whose logit is finite.
"""

from typing import NamedTuple

import jax
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
    wants_logprobs: Bool[Array, " R"]  # somebody is told how likely the token was
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


class PenaltyRows(NamedTuple):
    """Penalties of each row; at their defaults they change nothing."""

    slots: Int[Array, " R"]  # row of the count table; S = none
    repetition: Float[Array, " R"]  # 1 = off
    frequency: Float[Array, " R"]  # 0 = off
    presence: Float[Array, " R"]  # 0 = off


class BiasRows(NamedTuple):
    """What is added to some logits of each row, each token at most once; padded with (0, 0)."""

    token_ids: Int[Array, "R B"]
    values: Float[Array, "R B"]


def process(
    logits: Float[Array, "R V"],
    counts: Int[Array, "S V"],
    penalties: PenaltyRows,
    bias: BiasRows,
    masks: UInt32[Array, "R W"],
) -> Float[Array, "R V"]:
    """Penalties, logit_bias and masks, in this order.

    Args:
        logits: f32[R, V], raw.
        counts: i32[S, V]: twice how often the sequence in a slot has sampled a token, and 1 more if
            its prompt has it.
        penalties, bias: of each row.
        masks: u32[R, W], W = ceil(V / 32): bit i % 32 of word i // 32 is set where the row may sample
            token i.
    """
    logits = penalised(logits, counts.at[penalties.slots].get(mode="clip"), penalties)
    logits = jax.lax.cond(
        jnp.any(bias.values != 0), _biased, lambda logits, _: logits, logits, bias
    )
    return jnp.where(allowed(masks, logits.shape[1]), logits, NEVER)


def penalised(
    logits: Float[Array, "R V"], counts: Int[Array, "R V"], penalties: PenaltyRows
) -> Float[Array, "R V"]:
    """Repetition penalty for all tokens of prompt and output, as transformers has it; then frequency
    and presence penalty for those of the output, as OpenAI has them.

    Args:
        logits: f32[R, V].
        counts: i32[R, V], as in `process`.
        penalties: of each row.
    """
    repetition = jnp.where(counts > 0, penalties.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    num_sampled = counts >> 1
    logits = logits - num_sampled.astype(jnp.float32) * penalties.frequency[:, None]
    return logits - jnp.where(num_sampled > 0, penalties.presence[:, None], 0.0)


def _biased(logits: Float[Array, "R V"], bias: BiasRows) -> Float[Array, "R V"]:
    rows = jnp.arange(len(logits))[:, None]
    return logits.at[rows, bias.token_ids].add(bias.values)


def allowed(masks: UInt32[Array, "R W"], vocab_size: int) -> Bool[Array, "R V"]:
    """The bits of masks, one per token."""
    bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]
    return ((bits & 1) == 1).reshape(len(masks), -1)[:, :vocab_size]


def add_sampled(
    counts: Int[Array, "S V"], slots: Int[Array, " R"], token_ids: Int[Array, " R"]
) -> Int[Array, "S V"]:
    """The count table with one more token of each row; slot S stands for none.

    Args:
        counts: i32[S, V].
        slots: i32[R], distinct but for S.
        token_ids: i32[R].
    """
    return counts.at[slots, token_ids].add(2, mode="drop")


def load_counts(
    counts: Int[Array, "S V"],
    slot: Int[Array, ""],
    starts_over: Bool[Array, ""],
    token_ids: Int[Array, " N"],
    amounts: Int[Array, " N"],
) -> Int[Array, "S V"]:
    """The count table with a history, or a piece of one, in a slot.

    Args:
        counts: i32[S, V].
        slot: i32[].
        starts_over: bool[], forget what the slot held.
        token_ids, amounts: i32[N], added; padded with (0, 0).
    """
    row = jax.lax.dynamic_index_in_dim(counts, slot, keepdims=False)
    row = jnp.where(starts_over, 0, row).at[token_ids].add(amounts)
    return jax.lax.dynamic_update_index_in_dim(counts, row, slot, 0)


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
