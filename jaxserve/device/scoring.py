"""Scoring on the device: how likely the tokens of a prompt are, each from those before it.

    gather_scored (T)   the output of the last layer -> a block of SCORE_ROWS rows that are scored
    score               hidden rows -> logits -> log-probability and rank of one given token each
    score_top           the same, with the likeliest tokens

Owned by the executor. Only wanted tokens go through the head, in blocks of one size, so two programs
serve prompts of any length and no [T, V] array ever exists. A step that scores nothing calls none of
them.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.device.programs import Program, ProgramTable
from jaxserve.device.row_programs import head
from jaxserve.device.step_shapes import StepShapes
from jaxserve.model.registry import ModelFunctions, Params
from jaxserve.sample.logprobs import TargetScores, score_targets
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.schedule.batch import DeviceBatch, TokenScores

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


class Scoring:
    """Runs the programs that score.

    Args:
        shapes: of the engine.
        programs: the executor's table.
    """

    def __init__(self, shapes: StepShapes, programs: ProgramTable):
        self._shapes = shapes
        self._programs = programs

    def list_programs(self) -> list[Program]:
        """All that `warm_up` needs compiled."""
        model, tokens = self._shapes.model, self._shapes.buckets.tokens
        head = model.head_params(model.abstract_params)
        block = jax.ShapeDtypeStruct((SCORE_ROWS,), jnp.int32)
        hidden = self._hidden(SCORE_ROWS)
        num_top = min(MAX_LOGPROBS, self._shapes.num_candidates)
        return [
            *(
                Program(
                    key=(name, SCORE_ROWS),
                    function=functools.partial(score_rows, model, self._shapes.num_ids, most),
                    arguments=(head, hidden, block),
                    returns=(ScoredBlock, TargetScores),
                )
                for name, most in (("score_top", num_top), ("score", 0))
            ),
            *(
                Program(
                    key=("gather_scored", num_tokens),
                    function=gather_rows,
                    arguments=(self._hidden(num_tokens), block),
                )
                for num_tokens in tokens
            ),
        ]

    def _hidden(self, num_rows: int) -> jax.ShapeDtypeStruct:
        size = self._shapes.model.config.hidden_size
        return jax.ShapeDtypeStruct((num_rows, size), self._shapes.dtype)

    def warm_up(self, head_params: Params) -> None:
        """Runs each program once."""
        block = np.zeros(SCORE_ROWS, np.int32)
        for num_tokens in self._shapes.buckets.tokens:
            shape = self._hidden(num_tokens)
            x = jax.device_put(np.zeros(shape.shape, shape.dtype))
            hidden = self._programs["gather_scored", num_tokens](x, block)
        for name in ("score", "score_top"):
            jax.block_until_ready(self._programs[name, SCORE_ROWS](head_params, hidden, block))

    def start(self, batch: DeviceBatch, head_params: Params, x: jax.Array) -> list[ScoredBlock]:
        """Scores what a batch wants scored, if anything; waits for nothing.

        Args:
            batch: names the rows and their targets.
            head_params: from `model.head_params`.
            x: [T, E], the output of the last layer.
        """
        gather = self._programs["gather_scored", batch.bucket.num_tokens]
        score = self._programs["score_top" if batch.wants_score_top else "score", SCORE_ROWS]
        blocks = []
        for begin in range(0, len(batch.score_rows), SCORE_ROWS):
            part = slice(begin, begin + SCORE_ROWS)
            rows, targets = _padded(batch.score_rows[part]), _padded(batch.score_targets[part])
            blocks.append(ScoredBlock(*score(head_params, gather(x, rows), targets)))
        return blocks


def _padded(values: np.ndarray) -> np.ndarray:
    """i32[SCORE_ROWS]."""
    padded = np.zeros(SCORE_ROWS, np.int32)
    padded[: len(values)] = values
    return padded


def fetched_scores(
    blocks: Sequence[ScoredBlock], num_scored: int
) -> tuple[TokenScores, np.ndarray]:
    """The scores of a batch's rows, and bool[n] which of them are finite.

    Args:
        blocks: what `start` returned, as numpy arrays; at least one.
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
