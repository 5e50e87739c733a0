"""The programs that score: how likely the tokens of a prompt are, each from those before it.

    gather_scored (T)   the output of the last layer -> a block of SCORE_ROWS rows that are scored
    score               hidden rows -> logits -> log-probability and rank of one given token each
    score_top           the same, with the likeliest tokens

Only wanted tokens go through the head, in blocks of one size, so two programs serve prompts of any
length and no [T, V] array ever exists. Called by `scorer.Scorer`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.device.row_programs import head
from jaxserve.model.registry import ModelFunctions, Params
from jaxserve.sample.logprobs import TargetScores, score_targets
from jaxserve.schedule.batch import TokenScores

SCORE_ROWS = 64  # rows of a block


class ScoredBlock(NamedTuple):
    """What one call of `score` or `score_top` returns, per row."""

    scores: TargetScores
    finite: jax.Array  # bool[SCORE_ROWS]  every logit of the row is finite


def gather_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """[n, E]: the tokens of x [T, E] that `rows` i32[n] names."""
    return x.at[rows].get(mode="clip")


def score_rows(
    model: ModelFunctions,
    num_token_ids: int,
    num_top: int,
    head_params: Params,
    hidden: jax.Array,
    targets: jax.Array,
) -> ScoredBlock:
    """Head and scores of hidden rows.

    Args:
        model, num_token_ids: static; how many ids of the vocabulary are tokens.
        num_top: likeliest tokens of each row (K), static; 0 = none.
        head_params: from `model.head_params`.
        hidden: [SCORE_ROWS, E].
        targets: i32[SCORE_ROWS], the token to score in each row.
    """
    raw = head(model, SCORE_ROWS, num_token_ids, head_params, hidden)
    return ScoredBlock(score_targets(raw.logits, targets, num_top), raw.finite)


def fetched_scores(
    blocks: Sequence[ScoredBlock], num_scored: int
) -> tuple[TokenScores, np.ndarray]:
    """The scores of a batch's rows, and bool[n] which of them are finite.

    Args:
        blocks: of the batch, as numpy arrays; at least one.
        num_scored: rows of the batch (n); what lies behind them is padding.
    """

    def joined(parts: list) -> np.ndarray:
        return np.concatenate(parts)[:num_scored]

    scores = [block.scores for block in blocks]
    has_top = scores[0].top_ids is not None
    return (
        TokenScores(
            logprobs=joined([one.logprobs for one in scores]),
            ranks=joined([one.ranks for one in scores]),
            top_ids=joined([one.top_ids for one in scores]) if has_top else None,
            top_logprobs=joined([one.top_logprobs for one in scores]) if has_top else None,
        ),
        joined([block.finite for block in blocks]),
    )
