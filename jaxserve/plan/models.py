"""Shapes of well-known models, for planning without their checkpoints.

Read by `roofline.py`, the planner, the simulator and the scripts that compile or time shapes. Invariant
(held by a test): `num_params` of each entry is the count that its publisher states, so weight bytes are
exact.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass

from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig
from jaxserve.plan.model_table import CONFIGS


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What of a decoder-only model decides its bytes and its work.

    Args:
        vocab_size: V, rows of the embedding.
        hidden_size: E.
        intermediate_size: F, width of the gated MLP.
        num_layers: L.
        num_heads: H, query heads.
        num_kv_heads: K.
        head_dim: D.
        max_position_embeddings: longest context in tokens.
        tie_word_embeddings: the head is the embedding transposed.
        qkv_bias: biases on q, k and v.
        o_bias: a bias on o.
        mlp_bias: biases on gate, up and down.
        qk_norm: norms over the D elements of each query and each key, shared by the heads.
        layer_windows: keys that each layer looks back at, None for all of them; () = every layer at all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()

    @classmethod
    def from_config(cls, config: ModelConfig) -> "ModelSpec":
        """The shape of a checkpoint that the engine can serve."""
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.longest_context,
            tie_word_embeddings=config.tie_word_embeddings,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            mlp_bias=config.mlp_bias,
            qk_norm=config.qk_norm,
            layer_windows=config.layer_windows or (),
        )

    @property
    def num_layer_matmul_params(self) -> int:
        """Parameters of all layers' matrices: every token of a step is multiplied by each of them.

        L * (E*H*D + 2*E*K*D + H*D*E + 3*E*F)
        """
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (heads + 3 * self.intermediate_size)

    @property
    def num_head_params(self) -> int:
        """V * E: every sampling row of a step is multiplied by them."""
        return self.vocab_size * self.hidden_size

    @property
    def num_vector_params(self) -> int:
        """Norms and biases: 2*L*E + E, and what each layer has of q, k, v, o, gate, up and down biases
        and of norms of queries and keys.
        """
        each = 2 * self.hidden_size
        each += (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.qkv_bias
        each += self.hidden_size * self.o_bias
        each += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        each += 2 * self.head_dim * self.qk_norm
        return self.num_layers * each + self.hidden_size

    @property
    def num_params(self) -> int:
        """All parameters: matrices, embedding, head where it is its own, norms and biases."""
        embeddings = self.num_head_params * (1 if self.tie_word_embeddings else 2)
        return self.num_layer_matmul_params + embeddings + self.num_vector_params

    def kv_bytes_per_token(self, item_bytes: int = 2) -> int:
        """Bytes of one token's keys and values over all layers: 2 * L * K * D * item_bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item_bytes

    @property
    def window_shares(self) -> tuple[tuple[int | None, float], ...]:
        """Each window that layers have, None for none, and the share of the layers that have it."""
        counts = Counter(self.layer_windows or (None,))
        return tuple((window, count / counts.total()) for window, count in counts.items())

    def of_one_chip(
        self, num_chips: int, *, ffn_chips: int | None = None, vocab_chips: int | None = None
    ) -> "ModelSpec":
        """What each of several chips holds of it, as a model of its own: H / c query heads and its kv
        heads, a c-th of the MLP and of the vocabulary, which is filled up to a multiple of c; E stays
        whole. With fewer kv heads than chips each chip has one, and each head is held by c / K of them. (o
        and down biases and norms are held by all.)

        Args:
            num_chips: c, tensor parallel.
            ffn_chips, vocab_chips: chips that the MLP and the vocabulary are cut over; None = c.

        Raises:
            ConfigError: they cannot share the model; the message names the field.
        """
        if num_chips < 1:
            raise ConfigError(f"num_chips must be at least 1, got {num_chips}")
        ffn_chips, vocab_chips = ffn_chips or num_chips, vocab_chips or num_chips
        for count, chips, what in (
            (self.num_heads, num_chips, "query heads"),
            (self.intermediate_size, ffn_chips, "columns of the MLP (intermediate_size)"),
        ):
            if count % chips:
                raise ConfigError(f"num_chips must divide the model's {count} {what}, got {chips}")
        if self.num_kv_heads % num_chips and num_chips % self.num_kv_heads:
            raise ConfigError(
                f"num_chips must divide the model's {self.num_kv_heads} kv heads or be a multiple of "
                f"them, got {num_chips}"
            )
        return dataclasses.replace(
            self,
            num_heads=self.num_heads // num_chips,
            num_kv_heads=max(self.num_kv_heads // num_chips, 1),
            intermediate_size=self.intermediate_size // ffn_chips,
            vocab_size=-(-self.vocab_size // vocab_chips),
        )


MODELS: dict[str, ModelSpec] = {
    name: ModelSpec.from_config(config) for name, config in CONFIGS.items()
}
