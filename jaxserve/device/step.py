"""The pure functions that make up a step; `executor.py` compiles each once per rung of its ladder.

    embed   (T)   token ids -> [T, E]
    layers  (T)   a run of consecutive layers: [T, E] -> [T, E], pages written; called for one run
    after the other select  (T)   the rows that need logits: [T, E] -> [S, E]
    sample  (R)   the first R of those rows -> logits -> one token each

Cutting a step here makes a few small programs instead of len(T) x len(R) large ones: every run of
layers shares one program, and a step that samples nothing (the middle of a long prompt) skips the
head.
"""

from typing import NamedTuple

import jax

from jaxserve.model.attention import PagedRows
from jaxserve.model.registry import ModelFunctions, Params
from jaxserve.sample.logprobs import chosen_logprobs
from jaxserve.sample.sampler import SamplingRows, sample
from jaxserve.schedule.batch import DeviceBatch


class ForwardInputs(NamedTuple):
    """The part of a batch that the layers read. Shapes as in `DeviceBatch`."""

    token_ids: jax.Array
    positions: jax.Array
    rows: PagedRows
    logit_rows: jax.Array


def forward_inputs(batch: DeviceBatch) -> ForwardInputs:
    """The batch's arrays, untouched, in the shape that the layers take."""
    rows = PagedRows(
        kv_lens=batch.kv_lens,
        page_table=batch.page_table,
        kv_starts=batch.kv_starts,
        cu_q_lens=batch.cu_q_lens,
        ranges=batch.ranges,
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


def select_rows(x: jax.Array, logit_rows: jax.Array) -> jax.Array:
    """[S, E]: the tokens of x [T, E] that `logit_rows` i32[S] names; padding entries name token
    0.
    """
    return x.at[logit_rows].get(mode="clip")


def sample_rows(
    model: ModelFunctions, head_params: Params, hidden: jax.Array, rows: SamplingRows
) -> tuple[jax.Array, jax.Array]:
    """Head and sampler over the first R hidden rows.

    Args:
        model: static.
        head_params: from `model.head_params`.
        hidden: [S, E].
        rows: sampling parameters of R <= S rows.

    Returns:
        (token ids i32[R], logprobs f32[R] of these tokens under the raw logits).
    """
    num_rows = rows.temperature.shape[0]
    logits = model.logits(head_params, hidden[:num_rows])
    token_ids = sample(logits, rows)
    return token_ids, chosen_logprobs(logits, token_ids)
