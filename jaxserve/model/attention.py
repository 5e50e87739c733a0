"""Attention over paged KV: projections and rotation around the one kernel entry.

`PagedRows` is the part of a batch that attention reads; it is the same for every layer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.model.kv_scales import KVScales
from jaxserve.model.layers import Linear, RMSNorm
from jaxserve.model.rope import rotate
from jaxserve.model.sharding import over_heads
from jaxserve.model_config import ModelConfig
from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.layout import KVPages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedRows:
    """Where each row of the batch stands in the pages. Fields as in `ragged_paged_attention`.

    The leaves may be arrays, numpy arrays on their way to the device, or abstract shapes.
    """

    kv_lens: Any  # i32[S]
    page_table: Any  # i32[S * P]
    kv_starts: Any  # i32[S]
    cu_q_lens: Any  # i32[S + 1]
    ranges: Any  # i32[3]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """Which kernel attends and how it runs: the same for every layer, static in every program.

    Args:
        backend: a name of `pallas_kernels.dispatch`, "auto" resolved.
        interpret: run a Pallas kernel in its interpreter, on the CPU and slowly.
        mesh: devices that share the model, each attending with its own KV heads; None for one.
        axis: the axis of the mesh that the heads are cut by, several of them, or None: each device has
            all heads.
    """

    backend: str
    interpret: bool = False
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None
    axis: str | tuple[str, ...] | None = "model"

    @property
    def is_native(self) -> bool:
        """Whether it is the C++ kernel of one device, which others of C++ may go with."""
        return self.backend == "cpu" and self.mesh is None

    @property
    def attend(self) -> Callable[..., Any]:
        """`ragged_paged_attention`, on every device of the mesh where there is one."""
        if self.mesh is None:
            return ragged_paged_attention
        return over_heads(ragged_paged_attention, self.mesh, self.axis)


class Attention(nnx.Module):
    """Grouped-query attention; query head h reads kv head h // (H / K)."""

    def __init__(self, config: ModelConfig, dtype, kernel: AttentionKernel):
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q = Linear(config.hidden_size, q_size, dtype, use_bias=config.qkv_bias)
        self.k = Linear(config.hidden_size, kv_size, dtype, use_bias=config.qkv_bias)
        self.v = Linear(config.hidden_size, kv_size, dtype, use_bias=config.qkv_bias)
        self.o = Linear(q_size, config.hidden_size, dtype, use_bias=config.o_bias)
        self.q_norm, self.k_norm = head_norms(config, dtype)
        self.head_dim = config.head_dim
        self.attend = HeadAttention(kernel=kernel, scale=config.attention_scale)

    def __call__(
        self,
        x: Float[Array, "T E"],
        cos: Float[Array, "T 1 D2"],
        sin: Float[Array, "T 1 D2"],
        rows: PagedRows,
        kv: KVPages,
        scales: KVScales | None,
        window: int | None,
    ) -> tuple[Float[Array, "T E"], KVPages]:
        """Writes the tokens' keys and values into the layer's pages and attends.

        Args:
            x: [T, E].
            cos, sin: from `rope.rotation`.
            rows: where each row stands in the pages.
            kv: the layer's pages.
            scales: what they are quantised by, f32[K] each; None where they are floats.
            window: how many tokens a token sees, itself included; None for all.

        Returns:
            ([T, E], the layer's pages).
        """

        def heads(y: jax.Array, norm: RMSNorm | None = None) -> jax.Array:
            y = y.reshape(y.shape[0], -1, self.head_dim)
            return y if norm is None else norm(y)

        q = rotate(heads(self.q(x), self.q_norm), cos, sin)
        k = rotate(heads(self.k(x), self.k_norm), cos, sin)
        out, kv = self.attend(q, k, heads(self.v(x)), rows, kv, scales, window)
        return self.o(out), kv


def head_norms(config: ModelConfig, dtype: jnp.dtype) -> tuple[RMSNorm | None, RMSNorm | None]:
    """The norms of a head of q and of one of k, where the config has them."""
    if not config.qk_norm:
        return None, None
    q_norm, k_norm = (RMSNorm(config.head_dim, config.rms_norm_eps, dtype) for _ in "qk")
    return q_norm, k_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadAttention:
    """The one call of the kernel.

    Args:
        kernel: which one.
        scale: a query's products with keys are multiplied by it.
    """

    kernel: AttentionKernel
    scale: float

    def __call__(
        self,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"],
        rows: PagedRows,
        kv: KVPages,
        scales: KVScales | None,
        window: int | None,
    ) -> tuple[Float[Array, "T HD"], KVPages]:
        """Attends.

        Args:
            q, k, v: the tokens' heads, q and k rotated.
            rows, kv, scales, window: as in `Attention`.

        Returns:
            ([T, H * D], the layer's pages).
        """
        out, kv, _ = self.kernel.attend(
            q,
            k,
            v,
            kv,
            rows.kv_lens,
            rows.page_table,
            rows.kv_starts,
            rows.cu_q_lens,
            rows.ranges,
            None if scales is None else scales.k,
            None if scales is None else scales.v,
            sm_scale=self.scale,
            window=window,
            backend=self.kernel.backend,
            interpret=self.kernel.interpret or None,
        )
        return out.reshape(out.shape[0], -1), kv
