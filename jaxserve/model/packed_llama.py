"""The block and the head of `llama.py` in C++, on packed weights (`packed`): five calls a layer and one for
the head, with norm, rotation, SwiGLU, bias and residual inside the products beside them, where they run on
all threads while their operands are in the cache. `llama.py` says what is computed.

Made by `llama_parts`. Invariant: for the same weights these modules give what the plain ones give, to
rounding.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.model.attention import AttentionKernel, HeadAttention, PagedRows, head_norms
from jaxserve.model.layers import RMSNorm, param
from jaxserve.model_config import ModelConfig
from pallas_kernels.dense.cpu import (
    Norm,
    dense,
    dense_gated,
    dense_heads,
    gated_shape,
    packed_shape,
)
from pallas_kernels.ragged_paged_attention.layout import KVPages


class PackedWeight(nnx.Module):
    """A weight f32[P, in, 64] and, where the config asks for it, its bias."""

    def __init__(self, shape: tuple[int, int, int], num_bias: int, dtype: jnp.dtype):
        self.packed = param(shape, dtype)
        self.bias = param((num_bias,), dtype) if num_bias else None

    @property
    def operands(self) -> tuple[Array, Array | None]:
        """(weight, bias or None)."""
        return self.packed[...], None if self.bias is None else self.bias[...]


class PackedLinear(PackedWeight):
    """A projection, of a norm of its rows and with a residual where they are given; `multiplier` is for
    what is added to that.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        dtype: jnp.dtype,
        *,
        use_bias: bool = False,
        multiplier: float = 1.0,
    ):
        super().__init__(packed_shape(num_in, num_out), num_out if use_bias else 0, dtype)
        self.num_out = num_out
        self.multiplier = multiplier

    def __call__(
        self,
        x: Float[Array, "T I"],
        *,
        norm: RMSNorm | None = None,
        residual: Float[Array, "T O"] | None = None,
    ) -> Float[Array, "T O"]:
        packed, bias = self.operands
        return dense(
            x,
            packed,
            self.num_out,
            norm=_of(norm),
            bias=bias,
            residual=residual,
            multiplier=self.multiplier,
        )


class PackedGate(PackedWeight):
    """The first half of SwiGLU: silu(gate(norm(x))) * up(norm(x))."""

    def __init__(self, num_in: int, num_out: int, dtype: jnp.dtype, *, use_bias: bool):
        super().__init__(gated_shape(num_in, num_out), 2 * num_out if use_bias else 0, dtype)
        self.num_out = num_out

    def __call__(self, x: Float[Array, "T E"], norm: RMSNorm) -> Float[Array, "T I"]:
        packed, bias = self.operands
        return dense_gated(x, packed, self.num_out, norm=_of(norm), bias=bias)


class PackedHeads(PackedWeight):
    """q, k and v of norm(x), q and k normed by head where norms are given, and rotated."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        num_out = (self.num_heads + 2 * self.num_kv_heads) * config.head_dim
        shape = packed_shape(config.hidden_size, num_out)
        super().__init__(shape, num_out if config.qkv_bias else 0, dtype)

    def __call__(
        self,
        x: Float[Array, "T E"],
        norm: RMSNorm,
        cos: Float[Array, "T 1 D2"],
        sin: Float[Array, "T 1 D2"],
        head_norms: tuple[RMSNorm | None, RMSNorm | None],
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"]]:
        packed, bias = self.operands
        q_norm, k_norm = head_norms
        return dense_heads(
            x,
            packed,
            cos,
            sin,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norm=_of(norm),
            bias=bias,
            q_norm=_of(q_norm),
            k_norm=_of(k_norm),
        )


class PackedAttention(nnx.Module):
    """x + attention(norm(x))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, kernel: AttentionKernel):
        self.qkv = PackedHeads(config, dtype)
        q_size = config.num_heads * config.head_dim
        self.o = PackedLinear(
            q_size,
            config.hidden_size,
            dtype,
            use_bias=config.o_bias,
            multiplier=config.residual_multiplier,
        )
        self.q_norm, self.k_norm = head_norms(config, dtype)
        self.attend = HeadAttention(kernel=kernel, scale=config.attention_scale)

    def __call__(self, x, norm: RMSNorm, cos, sin, rows: PagedRows, kv: KVPages, scales, window):
        q, k, v = self.qkv(x, norm, cos, sin, (self.q_norm, self.k_norm))
        out, kv = self.attend(q, k, v, rows, kv, scales, window)
        return self.o(out, residual=x), kv


class PackedMLP(nnx.Module):
    """x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        outer, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = PackedGate(outer, inner, dtype, use_bias=bias)
        self.down = PackedLinear(
            inner, outer, dtype, use_bias=bias, multiplier=config.residual_multiplier
        )

    def __call__(self, x: Float[Array, "T E"], norm: RMSNorm) -> Float[Array, "T E"]:
        return self.down(self.gate_up(x, norm), residual=x)


class PackedLlamaBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, kernel: AttentionKernel):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attn = PackedAttention(config, dtype, kernel)
        self.post_attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = PackedMLP(config, dtype)

    def __call__(self, x, cos, sin, rows: PagedRows, kv: KVPages, scales, window: int | None):
        x, kv = self.attn(x, self.input_norm, cos, sin, rows, kv, scales, window)
        return self.mlp(x, self.post_attn_norm), kv


class PackedLlamaHead(nnx.Module):
    """Final norm and head, which is a packed copy of the embedding where the config ties them."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = PackedLinear(config.hidden_size, config.vocab_size, dtype)

    def __call__(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """Logits f32[R, V] of hidden rows [R, E]."""
        return self.lm_head(hidden, norm=self.norm)


def _of(norm: RMSNorm | None) -> Norm | None:
    return None if norm is None else Norm(norm.scale[...], norm.eps)
