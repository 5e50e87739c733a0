"""Llama: a stack of pre-norm attention and SwiGLU blocks over paged KV.

    params   {"embed": {"embedding"}, "layers": {0: {"input_norm", "attn", "post_attn_norm", "mlp"}, ...},
              "norm": {"scale"}, "lm_head": {"kernel"} unless tied}
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.model.attention import Attention, PagedRows
from jaxserve.model.layers import MLP, Embedding, Linear, RMSNorm
from jaxserve.model.rope import inverse_frequencies, rotation
from jaxserve.model_config import ModelConfig
from pallas_kernels.ragged_paged_attention.layout import KVPages


class LlamaBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, backend: str):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attn = Attention(config, dtype, backend)
        self.post_attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, dtype, use_bias=config.mlp_bias)

    def __call__(self, x, cos, sin, rows: PagedRows, kv: KVPages):
        attended, kv = self.attn(self.input_norm(x), cos, sin, rows, kv)
        x = x + attended
        return x + self.mlp(self.post_attn_norm(x)), kv


class Llama(nnx.Module):
    """The whole model.

    Args:
        config: shapes and constants.
        dtype: of weights and activations.
        backend: attention backend, a name of `pallas_kernels.dispatch`.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, backend: str):
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nnx.List(
            [LlamaBlock(config, dtype, backend) for _ in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, dtype)
        )
        self.config = config

    def hidden(
        self,
        token_ids: Int[Array, " T"],
        positions: Int[Array, " T"],
        rows: PagedRows,
        kv_pages: list[KVPages],
    ) -> tuple[Float[Array, "T E"], list[KVPages]]:
        """Hidden states before the final norm; the tokens' keys and values go into the pages.

        Args:
            token_ids, positions: i32[T], packed rows of the batch.
            rows: where each row stands in the pages.
            kv_pages: one `KVPages` per layer; donated by the caller.

        Returns:
            ([T, E], the pages of every layer).
        """
        inv_freq = inverse_frequencies(self.config.rope, self.config.head_dim)
        cos, sin = rotation(inv_freq, positions)
        x = self.embed(token_ids)
        written = []
        for layer, kv in zip(self.layers, kv_pages, strict=True):
            x, kv = layer(x, cos, sin, rows, kv)
            written.append(kv)
        return x, written

    def logits(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """f32[R, V] of hidden rows [R, E]: final norm and head."""
        normed = self.norm(hidden)
        if self.lm_head is None:
            return self.embed.attend(normed)
        return self.lm_head(normed).astype(jnp.float32)
