"""The layers that any Llama-like model is made of.

`linear` is the one projection; weights are plain arrays in it. `project` makes several at once, and
in C++ where that is faster.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels.dense.cpu import ROWS, dense
from pallas_kernels.tied_head.cpu import tied_head

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


def project(
    x: Float[Array, "T I"], layers: Sequence[Linear], *, is_native: bool
) -> list[Float[Array, "T _"]]:
    """Several projections of the same rows.

    Args:
        x: [T, in].
        layers: the projections.
        is_native: weights are float32 on a CPU that has the C++ kernels: they serve, as one call,
            the numbers of rows that they are made for.

    Returns:
        [T, out] of each layer.
    """
    if not is_native or x.shape[0] not in ROWS:
        return [layer(x) for layer in layers]
    found = dense(x, [layer.kernel[...] for layer in layers])
    return [
        y if layer.bias is None else y + layer.bias[...][None, :]
        for y, layer in zip(found, layers, strict=True)
    ]


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

    def attend(
        self, hidden: Float[Array, "R E"], *, is_native: bool = False
    ) -> Float[Array, "R V"]:
        """Logits f32[R, V] of hidden rows [R, E]; in C++ if `is_native`.

        In XLA the embedding stands on the left of the product: with one row, XLA on CPU would otherwise
        transpose the whole embedding in every step.
        """
        if is_native:
            return tied_head(hidden, self.embedding[...])
        return jnp.einsum(
            "ve,re->rv",
            self.embedding[...],
            hidden,
            precision=PRECISION,
            preferred_element_type=jnp.float32,
        )


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Source: Shazeer 2020. `is_joined` as in `join_layer`."""

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        dtype: jnp.dtype,
        *,
        use_bias: bool,
        is_native: bool = False,
        is_joined: bool = False,
    ):
        if is_joined:
            self.gate_up = Linear(hidden_size, 2 * inner_size, dtype, use_bias=use_bias)
        else:
            self.gate = Linear(hidden_size, inner_size, dtype, use_bias=use_bias)
            self.up = Linear(hidden_size, inner_size, dtype, use_bias=use_bias)
        self.down = Linear(inner_size, hidden_size, dtype, use_bias=use_bias)
        self.is_native = is_native
        self.is_joined = is_joined

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        if self.is_joined:
            (joined,) = project(x, [self.gate_up], is_native=self.is_native)
            gate, up = jnp.split(joined, 2, axis=1)
        else:
            gate, up = project(x, [self.gate, self.up], is_native=self.is_native)
        (out,) = project(jax.nn.silu(gate) * up, [self.down], is_native=self.is_native)
        return out
