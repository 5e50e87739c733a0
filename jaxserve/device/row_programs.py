"""The programs of a step's logit rows; what each does to a row stands in `sample.processors`.

    head        (R)   the first R hidden rows -> raw logits; which rows are finite
    process     (R)   raw logits -> processed ones: penalties, logit_bias, masks
    sample      (R)   raw and processed logits -> one token each
    count       (R)   the tokens -> the count table that penalties read
    candidates  (R)   raw and processed logits -> the likeliest tokens; only where a batch wants them
    load_counts       the history of a sequence -> the count table

Processed logits are the raw ones, the same array, and `process` and `count` are not called, where no
row of the batch asks for more.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.model.registry import ModelFunctions, Params
from jaxserve.sample.logprobs import chosen_logprobs, top_logprobs
from jaxserve.sample.processors import (
    BiasRows,
    PenaltyRows,
    SamplingRows,
    reported,
    without_padding,
)
from jaxserve.sample.sampler import sample
from jaxserve.schedule.batch import DeviceBatch, LogitBias, Penalties


def sampling_rows(batch: DeviceBatch) -> SamplingRows:
    """The batch's arrays, untouched, in the shape that the programs take."""
    return SamplingRows(*(getattr(batch, name) for name in SamplingRows._fields))


def penalty_rows(penalties: Penalties) -> PenaltyRows:
    """The arrays, untouched, in the shape that `process` takes."""
    return PenaltyRows(*penalties)  # type: ignore[arg-type]


def bias_rows(bias: LogitBias) -> BiasRows:
    """The arrays, untouched, in the shape that `process` takes."""
    return BiasRows(*bias)  # type: ignore[arg-type]


class RawLogits(NamedTuple):
    """What `head` returns, per logit row."""

    logits: jax.Array  # f32[R, V]    -inf for padded rows of the vocabulary
    finite: jax.Array  # bool[R]      every logit of the row was finite before that


class Sampled(NamedTuple):
    """What `sample_rows` returns, per logit row."""

    token_ids: jax.Array  # i32[R]    in [0, V), and no more than that where logits are not finite
    last_ids: jax.Array  # i32[S]     the same, padded with zeros: what the next step may read
    told: jax.Array  # i32[3 R + S]   what the host reads, as one array: `Told`


class Told(NamedTuple):
    """What the host is told of a step that samples, as numpy."""

    token_ids: np.ndarray  # i32[R]
    logprobs: np.ndarray  # f32[R]    of these, under what each row reports; zeros if none wants any
    rows_finite: np.ndarray  # bool[R]
    slices_finite: np.ndarray  # bool[S]

    @classmethod
    def read(cls, told: np.ndarray, num_rows: int) -> "Told":
        """Takes apart what `sample_rows` put together.

        Args:
            told: i32[3 R + S].
            num_rows: R.
        """
        ids, bits, rows_finite, slices_finite = np.split(told, np.arange(1, 4) * num_rows)
        return cls(ids, bits.view(np.float32), rows_finite != 0, slices_finite != 0)


def head(
    model: ModelFunctions,
    num_rows: int,
    num_token_ids: int,
    head_params: Params,
    hidden: jax.Array,
) -> RawLogits:
    """Final norm and head over the first R hidden rows.

    Args:
        model, num_rows, num_token_ids: static; R, and how many ids of the vocabulary are tokens.
        head_params: from `model.head_params`.
        hidden: [S, E].
    """
    logits = model.logits(head_params, hidden[:num_rows])
    finite = jnp.all(jnp.isfinite(logits), axis=1)
    return RawLogits(without_padding(logits, num_token_ids), finite)


def sample_rows(
    raw: jax.Array,
    processed: jax.Array,
    rows_finite: jax.Array,
    slices_finite: jax.Array,
    rows: SamplingRows,
) -> Sampled:
    """Draws a token per row.

    Args:
        raw, processed: f32[R, V].
        rows_finite: bool[R], from `head`.
        slices_finite: bool[S], from `select`.
        rows: sampling parameters of R rows.
    """
    token_ids = sample(processed, rows)
    last_ids = jnp.zeros(len(slices_finite), jnp.int32).at[: len(token_ids)].set(token_ids)
    wanted = jnp.any(rows.wants_logprobs)
    logprobs = jax.lax.switch(
        jnp.where(wanted, 1 + jnp.any(rows.reports_processed).astype(jnp.int32), 0),
        [  # summing over the vocabulary takes as long as the draw: only where somebody asks
            lambda: jnp.zeros(len(token_ids), jnp.float32),
            lambda: chosen_logprobs(raw, token_ids),
            lambda: chosen_logprobs(reported(raw, processed, rows), token_ids),
        ],
    )
    bits = jax.lax.bitcast_convert_type(logprobs, jnp.int32)
    flags = [one.astype(jnp.int32) for one in (rows_finite, slices_finite)]
    return Sampled(token_ids, last_ids, jnp.concatenate([token_ids, bits, *flags]))


def candidates(
    count: int, raw: jax.Array, processed: jax.Array, rows: SamplingRows
) -> tuple[jax.Array, jax.Array]:
    """The likeliest tokens of each row under what it reports: `top_logprobs`.

    Args:
        count: K, static.
        raw, processed: f32[R, V].
        rows: sampling parameters of R rows.
    """
    logits = jax.lax.cond(
        jnp.any(rows.reports_processed), lambda: reported(raw, processed, rows), lambda: raw
    )
    return top_logprobs(logits, count)
