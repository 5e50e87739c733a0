"""Attention of packed, ragged rows of tokens over paged KV, with the new tokens written in the same call."""

from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.layout import KVPages
from pallas_kernels.ragged_paged_attention.merge import merge_attention_states

__all__ = ["KVPages", "merge_attention_states", "ragged_paged_attention"]
