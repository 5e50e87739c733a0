"""The layers that any Llama-like model is made of.

`linear` is the one projection of plain weights; `PackedLinear` is the same in C++, on packed ones.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels.dense.cpu import dense, packed_shape

# float32 means float32: TPU and GPU would silently use fewer bits. bfloat16 operands are not affected.
PRECISION = jax.lax.Precision.HIGHEST


def linear(
    x: Float[Array, "T I"], kernel: Float[Array, "I O"], bias: Float[Array, " O"] | None = None
) -> Float[Array, "T O"]:
    """x @ kernel (+ bias), in x's dtype.

    Args:
        x: [T, in]. kernel: [in, out]. bias: [out] or None. All of one dtype.

    Returns:
        [T, out].
    """
    y = jnp.matmul(x, kernel, precision=PRECISION)
    return y if bias is None else y + bias[None, :]


def _param(shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, dtype))


class Linear(nnx.Module):
    """A projection: kernel [in, out] and, where the config asks for it, bias [out]."""

    def __init__(self, num_in: int, num_out: int, dtype: jnp.dtype, *, use_bias: bool = False):
        self.kernel = _param((num_in, num_out), dtype)
        self.bias = _param((num_out,), dtype) if use_bias else None

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        return linear(x, self.kernel[...], None if self.bias is None else self.bias[...])


class PackedLinear(nnx.Module):
    """A projection in C++, of any number of rows: packed f32[P, in, 64] (`model.packed`) and bias f32[out]
    where the config asks for it.
    """

    def __init__(self, num_in: int, num_out: int, dtype: jnp.dtype, *, use_bias: bool = False):
        self.packed = _param(packed_shape(num_in, num_out), dtype)
        self.bias = _param((num_out,), dtype) if use_bias else None
        self.num_out = num_out

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        y = dense(x, self.packed[...], self.num_out)
        return y if self.bias is None else y + self.bias[...][None, :]


class RMSNorm(nnx.Module):
    """Root mean square norm, computed in float32. Source: Zhang and Sennrich 2019."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype):
        self.scale = _param((size,), dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        return normed * self.scale[...][None, :]


class Embedding(nnx.Module):
    """Token embedding [V, E]; `attend` is the tied head."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: jnp.dtype):
        self.embedding = _param((vocab_size, hidden_size), dtype)

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T E"]:
        return self.embedding[...].at[token_ids].get(mode="clip")

    def attend(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """Logits f32[R, V] of hidden rows [R, E].

        The embedding stands on the left of the product: with one row, XLA on CPU would otherwise
        transpose the whole embedding in every step.
        """
        return jnp.einsum(
            "ve,re->rv",
            self.embedding[...],
            hidden,
            precision=PRECISION,
            preferred_element_type=jnp.float32,
        )


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Source: Shazeer 2020. `is_packed` as in `pack_layer`."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        dtype: jnp.dtype,
        *,
        use_bias: bool,
        is_packed: bool = False,
    ):
        if is_packed:
            self.gate_up = PackedLinear(hidden_size, 2 * inner_size, dtype, use_bias=use_bias)
            self.down = PackedLinear(inner_size, hidden_size, dtype, use_bias=use_bias)
        else:
            self.gate = Linear(hidden_size, inner_size, dtype, use_bias=use_bias)
            self.up = Linear(hidden_size, inner_size, dtype, use_bias=use_bias)
            self.down = Linear(inner_size, hidden_size, dtype, use_bias=use_bias)
        self.is_packed = is_packed

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        if self.is_packed:
            gate, up = jnp.split(self.gate_up(x), 2, axis=1)
        else:
            gate, up = self.gate(x), self.up(x)
        return self.down(jax.nn.silu(gate) * up)
