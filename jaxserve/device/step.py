"""The two pure functions that make up a step; `programs.py` compiles them, one per rung of a ladder.

    forward  (T)   tokens of the step -> pages written, hidden states of the rows that need logits
    sample   (R)   the first R of those rows -> logits -> one token each

Splitting them here makes len(T) + len(R) programs instead of len(T) x len(R), and lets a step that samples nothing
(the middle of a long prompt) skip the head.
"""

from typing import NamedTuple

import jax

from jaxserve.model.attention import PagedRows
from jaxserve.model.registry import ModelFunctions, Params
from jaxserve.sample.logprobs import chosen_logprobs
from jaxserve.sample.sampler import SamplingRows, sample
from jaxserve.schedule.batch import DeviceBatch
from pallas_kernels.ragged_paged_attention.layout import KVPages


class ForwardInputs(NamedTuple):
    """The part of a batch that `forward` reads. Shapes as in `DeviceBatch`."""

    token_ids: jax.Array
    positions: jax.Array
    rows: PagedRows
    logit_rows: jax.Array


def forward_inputs(batch: DeviceBatch) -> ForwardInputs:
    """The batch's arrays, untouched, in the shape that `forward` takes."""
    rows = PagedRows(
        kv_lens=batch.kv_lens,  # type: ignore[arg-type]
        page_table=batch.page_table,  # type: ignore[arg-type]
        kv_starts=batch.kv_starts,  # type: ignore[arg-type]
        cu_q_lens=batch.cu_q_lens,  # type: ignore[arg-type]
        ranges=batch.ranges,  # type: ignore[arg-type]
    )
    return ForwardInputs(batch.token_ids, batch.positions, rows, batch.logit_rows)  # type: ignore[arg-type]


def sampling_rows(batch: DeviceBatch) -> SamplingRows:
    """The batch's arrays, untouched, in the shape that `sample_rows` takes."""
    return SamplingRows(
        temperature=batch.temperature,  # type: ignore[arg-type]
        top_k=batch.top_k,  # type: ignore[arg-type]
        top_p=batch.top_p,  # type: ignore[arg-type]
        min_p=batch.min_p,  # type: ignore[arg-type]
        seeds=batch.seeds,  # type: ignore[arg-type]
        output_positions=batch.output_positions,  # type: ignore[arg-type]
    )


def forward(
    model: ModelFunctions, params: Params, kv_pages: list[KVPages], inputs: ForwardInputs
) -> tuple[jax.Array, list[KVPages]]:
    """Runs the layers over a step's tokens.

    Args:
        model: static.
        params: weights.
        kv_pages: one per layer; donated.
        inputs: the batch.

    Returns:
        (hidden states [S, E] of `logit_rows`, the pages of every layer).
    """
    hidden, kv_pages = model.hidden(
        params, inputs.token_ids, inputs.positions, inputs.rows, kv_pages
    )
    return hidden.at[inputs.logit_rows].get(mode="clip"), kv_pages


def sample_rows(
    model: ModelFunctions, params: Params, hidden: jax.Array, rows: SamplingRows
) -> tuple[jax.Array, jax.Array]:
    """Head and sampler over the first R hidden rows.

    Args:
        model: static.
        params: weights.
        hidden: [S, E].
        rows: sampling parameters of R <= S rows.

    Returns:
        (token ids i32[R], logprobs f32[R] of these tokens under the raw logits).
    """
    num_rows = rows.temperature.shape[0]
    logits = model.logits(params, hidden[:num_rows])
    token_ids = sample(logits, rows)
    return token_ids, chosen_logprobs(logits, token_ids)
