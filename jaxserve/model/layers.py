"""The layers that any Llama-like model is made of. `linear` is the one projection."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

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


def param(shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param:
    """A parameter, to be replaced by what is loaded."""
    return nnx.Param(jnp.zeros(shape, dtype))


class Linear(nnx.Module):
    """A projection: kernel [in, out] and, where the config asks for it, bias [out]."""

    def __init__(self, num_in: int, num_out: int, dtype: jnp.dtype, *, use_bias: bool = False):
        self.kernel = param((num_in, num_out), dtype)
        self.bias = param((num_out,), dtype) if use_bias else None

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        return linear(x, self.kernel[...], None if self.bias is None else self.bias[...])


class RMSNorm(nnx.Module):
    """Root mean square norm, computed in float32. Source: Zhang and Sennrich 2019."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype):
        self.scale = param((size,), dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        scale = self.scale[...]
        return normed * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


class Embedding(nnx.Module):
    """Token embedding [V, E]; `attend` is the tied head."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: jnp.dtype):
        self.embedding = param((vocab_size, hidden_size), dtype)

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
    """SwiGLU: down(silu(gate(x)) * up(x)). Source: Shazeer 2020."""

    def __init__(self, hidden_size: int, inner_size: int, dtype: jnp.dtype, *, use_bias: bool):
        self.gate = Linear(hidden_size, inner_size, dtype, use_bias=use_bias)
        self.up = Linear(hidden_size, inner_size, dtype, use_bias=use_bias)
        self.down = Linear(inner_size, hidden_size, dtype, use_bias=use_bias)

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
