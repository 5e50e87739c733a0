"""The pure functions that make up a step; `executor.py` compiles each once per rung of its ladder.

    embed       (T)   token ids, and those sampled last -> [T, E]; what else changes in every step
    layers      (T)   a run of consecutive layers: [T, E] -> [T, E], pages written; called for one
                      run after the other
    select      (T)   the rows that need logits: [T, E] -> [S, E]; which slices are finite

and the programs of R rows of logits, in `row_programs.py`.

Cutting a step here makes a few small programs instead of len(T) x len(R) large ones: runs of layers
share one program, or one for each sort of run where layers differ in window or rope, and a step that
samples nothing (the middle of a long prompt) skips the head.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.model.attention import PagedRows
from jaxserve.model.registry import ModelFunctions, Params
from jaxserve.schedule.batch import DeviceBatch


class Embedded(NamedTuple):
    """What `embed_tokens` returns."""

    x: jax.Array  # [T, E]
    positions: jax.Array  # i32[T]
    kv_lens: jax.Array  # i32[S]


def moving_inputs(batch: DeviceBatch) -> np.ndarray:
    """What changes from each step to the next, as one array: the host sends it once, and on the device
    it comes apart. i32[2 T + S]: token ids, positions, kv_lens.
    """
    return np.concatenate([batch.token_ids, batch.positions, batch.kv_lens])


def embed_tokens(
    model: ModelFunctions,
    num_tokens: int,
    embed_params: Params,
    moving: jax.Array,
    last_ids: jax.Array,
) -> Embedded:
    """Token embeddings; tokens that the host does not know yet are read from the step before.

    Args:
        model, num_tokens: static; T.
        embed_params: params["embed"].
        moving: i32[2 T + S], `moving_inputs`; the token id -1 - r stands for last_ids[r].
        last_ids: i32[S], what each logit row of the step before sampled.
    """
    token_ids, positions, kv_lens = jnp.split(moving, [num_tokens, 2 * num_tokens])
    known = jnp.where(token_ids < 0, last_ids.at[-1 - token_ids].get(mode="clip"), token_ids)
    return Embedded(model.embed(embed_params, known), positions, kv_lens)


class StillInputs(NamedTuple):
    """What the layers read beside that, and what is mostly as it was in the step before."""

    page_table: Any
    kv_starts: Any
    cu_q_lens: Any
    ranges: Any
    logit_rows: Any

    @classmethod
    def of(cls, batch: DeviceBatch) -> "StillInputs":
        """The batch's arrays, untouched."""
        return cls(
            batch.page_table, batch.kv_starts, batch.cu_q_lens, batch.ranges, batch.logit_rows
        )

    def rows(self, kv_lens: Any) -> PagedRows:
        """In the shape that the layers take."""
        return PagedRows(
            kv_lens=kv_lens,
            page_table=self.page_table,
            kv_starts=self.kv_starts,
            cu_q_lens=self.cu_q_lens,
            ranges=self.ranges,
        )


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
