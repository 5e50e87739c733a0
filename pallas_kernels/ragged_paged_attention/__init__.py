"""Attention of packed, ragged rows of tokens over paged KV, with the new tokens written in the same call."""

from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.layout import KVPages

__all__ = ["KVPages", "ragged_paged_attention"]
