"""The pure functions that make up a step; `executor.py` compiles each once per rung of its ladder.

    embed       (T)   token ids, and those sampled last -> [T, E]
    layers      (T)   a run of consecutive layers: [T, E] -> [T, E], pages written; called for one
                      run after the other
    select      (T)   the rows that need logits: [T, E] -> [S, E]; which slices are finite

and the programs of R rows of logits, in `row_programs.py`.

Cutting a step here makes a few small programs instead of len(T) x len(R) large ones: runs of layers
share one program, or one for each sort of run where layers differ in window or rope, and a step that
samples nothing (the middle of a long prompt) skips the head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.model.attention import PagedRows
from jaxserve.model.registry import ModelFunctions, Params
from jaxserve.schedule.batch import DeviceBatch


def embed_tokens(
    model: ModelFunctions, embed_params: Params, token_ids: jax.Array, last_ids: jax.Array
) -> jax.Array:
    """Token embeddings; tokens that the host does not know yet are read from the step before.

    Args:
        model: static.
        embed_params: params["embed"].
        token_ids: i32[T]; -1 - r stands for last_ids[r].
        last_ids: i32[S], what each logit row of the step before sampled.

    Returns:
        [T, E].
    """
    known = jnp.where(token_ids < 0, last_ids.at[-1 - token_ids].get(mode="clip"), token_ids)
    return model.embed(embed_params, known)


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


def select(
    x: jax.Array, logit_rows: jax.Array, cu_q_lens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What is left to know of the last layer's output once its pages are written.

    Args:
        x: [T, E].
        logit_rows: i32[S].
        cu_q_lens: i32[S+1].

    Returns:
        (`select_rows`, `finite_slices`).
    """
    return select_rows(x, logit_rows), finite_slices(x, cu_q_lens)


def select_rows(x: jax.Array, logit_rows: jax.Array) -> jax.Array:
    """[S, E]: the tokens of x [T, E] that `logit_rows` i32[S] names; padding entries name token
    0.
    """
    return x.at[logit_rows].get(mode="clip")


def finite_slices(x: jax.Array, cu_q_lens: jax.Array) -> jax.Array:
    """Which slices are free of NaN and infinity.

    All tokens are looked at, not only the last: one that is not finite reaches the last through its
    keys and values, but not through pages of int8, which hold no NaN. One that becomes so anywhere
    is so after the last layer, for every layer adds to what it is given.

    Args:
        x: [T, E], the output of the last layer.
        cu_q_lens: i32[S+1], where each slice's tokens begin and end.

    Returns:
        bool[S], True for padded rows, which have no tokens.
    """
    bad = jnp.any(~jnp.isfinite(x), axis=1).astype(jnp.int32)
    num_bad = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(bad, dtype=jnp.int32)])
    return num_bad[cu_q_lens[1:]] == num_bad[cu_q_lens[:-1]]
