"""Shapes of well-known models, for planning without their checkpoints.

Read by `roofline.py`, the simulator and the scripts that compile or time shapes. Invariant (held by
a test): `num_params` of each entry is the count that its publisher states, so weight bytes are exact.
A shape here says nothing about whether the engine can serve the model: that is `ModelConfig`'s word.
"""

from dataclasses import dataclass

from jaxserve.model_config import ModelConfig


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
        num_extra_layer_params: parameters of a layer beside its matrices and its two norms: biases,
            and the norms of queries and keys.
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
    num_extra_layer_params: int = 0

    @classmethod
    def from_config(cls, config: ModelConfig) -> "ModelSpec":
        """The shape of a checkpoint that the engine can serve."""
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        attention_biases = width + config.hidden_size if config.attention_bias else 0
        mlp_biases = 2 * config.intermediate_size + config.hidden_size if config.mlp_bias else 0
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=config.tie_word_embeddings,
            num_extra_layer_params=attention_biases + mlp_biases,
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
    def num_params(self) -> int:
        """All parameters: matrices, embedding, head where it is its own, norms and biases."""
        embeddings = self.num_head_params * (1 if self.tie_word_embeddings else 2)
        norms = self.hidden_size * (2 * self.num_layers + 1)
        extra = self.num_layers * self.num_extra_layer_params
        return self.num_layer_matmul_params + embeddings + norms + extra

    def kv_bytes_per_token(self, item_bytes: int = 2) -> int:
        """Bytes of one token's keys and values over all layers: 2 * L * K * D * item_bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item_bytes


# Source of each: config.json of the checkpoint named in the comment.
MODELS: dict[str, ModelSpec] = {
    # HuggingFaceTB/SmolLM2-135M-Instruct
    "smollm2-135m": ModelSpec(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    # meta-llama/Llama-3.2-1B
    "llama-3.2-1b": ModelSpec(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
    # meta-llama/Llama-3.1-8B; Llama 3 has the same shape and a context of 8,192
    "llama-3-8b": ModelSpec(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    ),
    # meta-llama/Llama-3.1-70B; likewise
    "llama-3-70b": ModelSpec(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    ),
    # mistralai/Mistral-7B-v0.3
    "mistral-7b": ModelSpec(
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
    ),
    # Qwen/Qwen2.5-7B; biases on q, k and v
    "qwen2.5-7b": ModelSpec(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        max_position_embeddings=131072,
        num_extra_layer_params=(28 + 2 * 4) * 128,
    ),
    # Qwen/Qwen3-8B; norms of q and k
    "qwen3-8b": ModelSpec(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        num_extra_layer_params=2 * 128,
    ),
}
