"""The block and the head of `llama.py` in C++, on packed weights (`packed`): five calls a layer and one for
the head, with norm, rotation, SwiGLU, bias and residual inside the products beside them, where they run on
all threads while their operands are in the cache. `llama.py` says what is computed.

Made by `llama_parts`. Invariant: for the same weights these modules give what the plain ones give, to
rounding.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.model.attention import AttentionKernel, HeadAttention, PagedRows
from jaxserve.model.layers import RMSNorm, param
from jaxserve.model.packed import LayerLayout
from jaxserve.model_config import ModelConfig
from pallas_kernels.dense.cpu import Norm, Part, dense, dense_gated, dense_heads, packed_shape
from pallas_kernels.ragged_paged_attention.layout import KVPages


class PackedLlamaBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); all that a layer is made of is one array."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, kernel: AttentionKernel):
        self.layout = LayerLayout.of(config)
        self.packed = param((self.layout.size,), dtype)
        self.attend = HeadAttention(kernel=kernel, scale=config.attention_scale)
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.inner_size = config.head_dim, config.intermediate_size
        self.eps, self.multiplier = config.rms_norm_eps, config.residual_multiplier

    def __call__(self, x, cos, sin, rows: PagedRows, kv: KVPages, scales, window: int | None):
        q, k, v = dense_heads(
            x,
            self._weight("qkv"),
            cos,
            sin,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norm=self._norm("input_norm"),
            bias=self._part("qkv_bias"),
            q_norm=self._norm("q_norm"),
            k_norm=self._norm("k_norm"),
        )
        attended, kv = self.attend(q, k, v, rows, kv, scales, window)
        x = self._added_to(x, attended, "o")
        inner = dense_gated(
            x,
            self._weight("gate_up"),
            self.inner_size,
            norm=self._norm("post_attn_norm"),
            bias=self._part("gate_up_bias"),
        )
        return self._added_to(x, inner, "down"), kv

    def _added_to(
        self, x: Float[Array, "T E"], rows: Float[Array, "T I"], name: str
    ) -> Float[Array, "T E"]:
        """x and a projection of other rows."""
        return dense(
            rows,
            self._weight(name),
            x.shape[1],
            bias=self._part(f"{name}_bias"),
            residual=x,
            multiplier=self.multiplier,
        )

    def _part(self, name: str) -> Part | None:
        return self.layout.part(name, self.packed[...])

    def _weight(self, name: str) -> Part:
        part = self._part(name)
        assert part is not None, name
        return part

    def _norm(self, name: str) -> Norm | None:
        scale = self._part(name)
        return None if scale is None else Norm(scale, self.eps)


class PackedHead(nnx.Module):
    """A projection to the vocabulary, of a norm of its rows."""

    def __init__(self, num_in: int, num_out: int, dtype: jnp.dtype):
        self.packed = param(packed_shape(num_in, num_out), dtype)
        self.num_out = num_out

    def __call__(self, x: Float[Array, "R E"], norm: RMSNorm) -> Float[Array, "R V"]:
        return dense(x, self.packed[...], self.num_out, norm=Norm(norm.scale[...], norm.eps))


class PackedLlamaHead(nnx.Module):
    """Final norm and head, which is a packed copy of the embedding where the config ties them."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = PackedHead(config.hidden_size, config.vocab_size, dtype)

    def __call__(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """Logits f32[R, V] of hidden rows [R, E]."""
        return self.lm_head(hidden, self.norm)
