"""What a step has to read and to compute: bytes and floating-point operations, on one chip.

Read by `roofline.py`, which divides them by what a chip can do, and by the engine's meter, which divides
them by the time that steps took. Both see a step as four sums over its rows, so that a caller with hundreds
of rows keeps four running sums and pays nothing per row:

    num_tokens          T, tokens computed
    num_logit_rows      R, rows that sample
    num_context_tokens  sum over rows of the context they read, this step's tokens included
    num_pairs           sum over rows of (query, key) pairs: T * start + T * (T + 1) / 2

Invariant: only what no implementation can avoid is counted: each weight once a step, each key and value
once a row, no padding. So a share of a roofline computed from it is never flattered.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.config import KV_CACHE_DTYPES
from jaxserve.plan.models import ModelSpec
from pallas_kernels.page_bytes import ITEM_BYTES

Counts = Any  # an integer, or an array of them: the sums are the same
PLANNED_DTYPES = ("bfloat16", "float32")  # of weights and activations


def num_pairs(start: Counts, num_tokens: Counts, window: int | None = None) -> Counts:
    """(query, key) pairs of a causal slice: token i of it sees start + i + 1 keys, at most its window.

    Args:
        start: tokens before the slice; a number, or i64[S].
        num_tokens: tokens of the slice; likewise.
        window: keys that a token looks back at, its own included; None = all of them.
    """
    if window is None:
        return num_tokens * start + num_tokens * (num_tokens + 1) // 2
    return _seen(start + num_tokens, window) - _seen(start, window)


def _seen(num_tokens: Counts, window: int) -> Counts:
    """Pairs of a text's first tokens: a triangle up to the window, then a band of its width."""
    inside = np.minimum(num_tokens, window)
    return inside * (inside + 1) // 2 + (num_tokens - inside) * window


def keys_read(start: Counts, num_tokens: Counts, window: int | None = None) -> Counts:
    """Keys that a slice reads, its own included: all before its end, or those in its first token's window
    and after; arguments as `num_pairs`.
    """
    end = start + num_tokens
    return end if window is None else end - np.maximum(start - window + 1, 0)


def kv_item_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """The element type of pages by its numpy name.

    Args:
        kv_cache_dtype: a key of `KV_CACHE_DTYPES`.
        dtype: of weights and activations, what "auto" means.
    """
    return KV_CACHE_DTYPES[kv_cache_dtype] or dtype


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The coefficients of the four sums.

    Args:
        layer_bytes: of all layers' matrices; every step reads them.
        head_bytes: of the head; a step that samples reads it.
        kv_bytes_per_token: of a token's keys and values over all layers.
        flops_per_token: two for each element of the layers' matrices.
        flops_per_row: two for each element of the head.
        flops_per_pair: of attention over all layers: 4 * L * H * D.
    """

    layer_bytes: int
    head_bytes: int
    kv_bytes_per_token: int
    flops_per_token: int
    flops_per_row: int
    flops_per_pair: int

    @classmethod
    def of(cls, model: ModelSpec, *, dtype: str, kv_cache_dtype: str = "auto") -> "StepWork":
        """Of a model, or of a chip's part of one (`ModelSpec.of_one_chip`).

        Args:
            model: the shapes.
            dtype: of weights and activations, by numpy's name.
            kv_cache_dtype: of pages, a key of `KV_CACHE_DTYPES`.
        """
        item_bytes = ITEM_BYTES[dtype]
        kv_item_bytes = ITEM_BYTES[kv_item_dtype(kv_cache_dtype, dtype)]
        return cls(
            layer_bytes=model.num_layer_matmul_params * item_bytes,
            head_bytes=model.num_head_params * item_bytes,
            kv_bytes_per_token=model.kv_bytes_per_token(kv_item_bytes),
            flops_per_token=2 * model.num_layer_matmul_params,
            flops_per_row=2 * model.num_head_params,
            flops_per_pair=4 * model.num_layers * model.num_heads * model.head_dim,
        )

    def weight_bytes(self, num_logit_rows: int) -> int:
        """Bytes of weights that a step reads: the head's only where a row samples."""
        return self.layer_bytes + (self.head_bytes if num_logit_rows else 0)

    def kv_bytes(self, num_tokens: int, num_context_tokens: float) -> float:
        """Bytes of keys and values that a step reads, and those of its own tokens that it writes."""
        return self.kv_bytes_per_token * (num_context_tokens + num_tokens)

    def flops(self, num_tokens: int, num_logit_rows: int, num_pairs: float) -> float:
        """Operations of a step; a multiply-add is two."""
        return (
            self.flops_per_token * num_tokens
            + self.flops_per_row * num_logit_rows
            + self.flops_per_pair * num_pairs
        )
