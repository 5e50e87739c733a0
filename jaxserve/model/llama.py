"""Llama: a stack of pre-norm attention and SwiGLU blocks over paged KV, in three parts: embedding,
block, head.

params   {"embed": {"embedding"}, "layers": {0: {"input_norm", "attn", "post_attn_norm", "mlp"},
...},
          "norm": {"scale"}, "lm_head": {"kernel"} unless tied}

That is the form in which params are given; on their way to the device matrices may be packed (`packed`),
and then the same runs in C++ (`packed_llama`).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.model.attention import Attention, AttentionKernel, PagedRows
from jaxserve.model.layers import MLP, Embedding, Linear, RMSNorm
from jaxserve.model.packed_llama import PackedLlamaBlock, PackedLlamaHead
from jaxserve.model_config import ModelConfig
from pallas_kernels.ragged_paged_attention.layout import KVPages


class ModelParts(NamedTuple):
    """What a model family gives: constructors of its NNX modules. A block serves every layer;
    `packed_block` and `packed_head` are the same for params of `model.packed`.
    """

    embed: Callable[[], nnx.Module]
    block: Callable[[], nnx.Module]
    packed_block: Callable[[], nnx.Module]
    head: Callable[[], nnx.Module]
    packed_head: Callable[[], nnx.Module]


class LlamaBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, kernel: AttentionKernel):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attn = Attention(config, dtype, kernel)
        self.post_attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(
            config.hidden_size, config.intermediate_size, dtype, use_bias=config.mlp_bias
        )
        self.multiplier = config.residual_multiplier

    def __call__(self, x, cos, sin, rows: PagedRows, kv: KVPages, scales, window: int | None):
        attended, kv = self.attn(self.input_norm(x), cos, sin, rows, kv, scales, window)
        x = x + self._weighed(attended)
        return x + self._weighed(self.mlp(self.post_attn_norm(x))), kv

    def _weighed(self, added: jax.Array) -> jax.Array:
        return added if self.multiplier == 1.0 else added * self.multiplier


class LlamaHead(nnx.Module):
    """Final norm and head; the head is the embedding itself where the config ties them."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if config.tie_word_embeddings:
            self.embed = Embedding(config.vocab_size, config.hidden_size, dtype)
        else:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype)

    def __call__(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """Logits f32[R, V] of hidden rows [R, E]."""
        normed = self.norm(hidden)
        if hasattr(self, "embed"):
            return self.embed.attend(normed)
        return self.lm_head(normed).astype(jnp.float32)


def llama_parts(config: ModelConfig, dtype: jnp.dtype, kernel: AttentionKernel) -> ModelParts:
    """The three parts of a Llama, for `registry.build_model`.

    Args:
        config: shapes and constants.
        dtype: of weights and activations.
        kernel: which attention kernel, and how it runs.
    """
    return ModelParts(
        embed=lambda: Embedding(config.vocab_size, config.hidden_size, dtype),
        block=lambda: LlamaBlock(config, dtype, kernel),
        packed_block=lambda: PackedLlamaBlock(config, dtype, kernel),
        head=lambda: LlamaHead(config, dtype),
        packed_head=lambda: PackedLlamaHead(config, dtype),
    )
