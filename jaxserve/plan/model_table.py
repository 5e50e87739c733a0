"""Configs of well-known models, by the names that `jaxserve plan` and the simulator take.

Read by `models.py`. Source of each: config.json of the checkpoint named in the comment. Invariant (held by a
test): the parameters of each are as many as its publisher counts.
"""

from jaxserve.model_config import ModelConfig, RopeConfig


def _config(
    architecture: str,
    *,
    vocab: int,
    hidden: int,
    ffn: int,
    layers: int,
    heads: tuple[int, int, int],
    context: int,
    theta: float,
    eps: float = 1e-5,
    **flags,
) -> ModelConfig:
    """A config; heads are (H, K, D)."""
    rope = flags.pop("rope", None) or RopeConfig(theta=theta)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        max_position_embeddings=context,
        rms_norm_eps=eps,
        rope=rope,
        **flags,
    )


def _smollm2(*, hidden: int, ffn: int, layers: int, heads: tuple[int, int, int], theta: float):
    return _config(
        "llama",
        vocab=49152,
        hidden=hidden,
        ffn=ffn,
        layers=layers,
        heads=heads,
        context=8192,
        theta=theta,
        tie_word_embeddings=True,
    )


def _llama_3(
    *,
    hidden: int,
    ffn: int,
    layers: int,
    heads: tuple[int, int, int],
    factor: float = 8.0,
    tied: bool = False,
) -> ModelConfig:
    """Llama 3.1 and later; Llama 3 has the same shapes and a context of 8,192."""
    rope = RopeConfig(
        theta=500000.0, rope_type="llama3", factor=factor, original_max_position_embeddings=8192
    )
    return _config(
        "llama",
        vocab=128256,
        hidden=hidden,
        ffn=ffn,
        layers=layers,
        heads=heads,
        context=131072,
        theta=500000.0,
        rope=rope,
        tie_word_embeddings=tied,
    )


def _qwen2(
    *,
    hidden: int,
    ffn: int,
    layers: int,
    heads: tuple[int, int, int],
    vocab: int = 152064,
    context: int = 131072,
    tied: bool = False,
) -> ModelConfig:
    return _config(
        "qwen2",
        vocab=vocab,
        hidden=hidden,
        ffn=ffn,
        layers=layers,
        heads=heads,
        context=context,
        theta=1e6,
        eps=1e-6,
        qkv_bias=True,
        tie_word_embeddings=tied,
    )


def _qwen3(
    *, hidden: int, ffn: int, layers: int, heads: tuple[int, int, int], tied: bool = False
) -> ModelConfig:
    return _config(
        "qwen3",
        vocab=151936,
        hidden=hidden,
        ffn=ffn,
        layers=layers,
        heads=heads,
        context=40960,
        theta=1e6,
        eps=1e-6,
        qk_norm=True,
        tie_word_embeddings=tied,
    )


CONFIGS: dict[str, ModelConfig] = {
    # HuggingFaceTB/SmolLM2-135M-Instruct, -360M-Instruct, -1.7B-Instruct
    "smollm2-135m": _smollm2(hidden=576, ffn=1536, layers=30, heads=(9, 3, 64), theta=1e5),
    "smollm2-360m": _smollm2(hidden=960, ffn=2560, layers=32, heads=(15, 5, 64), theta=1e5),
    "smollm2-1.7b": _smollm2(hidden=2048, ffn=8192, layers=24, heads=(32, 32, 64), theta=1.3e5),
    # HuggingFaceTB/SmolLM3-3B; every fourth layer turns nothing
    "smollm3-3b": _config(
        "smollm3",
        vocab=128256,
        hidden=2048,
        ffn=11008,
        layers=36,
        heads=(16, 4, 128),
        context=65536,
        theta=5e6,
        eps=1e-6,
        rope_layers=(True, True, True, False) * 9,
        tie_word_embeddings=True,
    ),
    # meta-llama/Llama-2-7b-hf
    "llama-2-7b": _config(
        "llama",
        vocab=32000,
        hidden=4096,
        ffn=11008,
        layers=32,
        heads=(32, 32, 128),
        context=4096,
        theta=1e4,
    ),
    # meta-llama/Llama-3.2-1B, Llama-3.2-3B, Llama-3.1-8B, Llama-3.1-70B
    "llama-3.2-1b": _llama_3(
        hidden=2048, ffn=8192, layers=16, heads=(32, 8, 64), factor=32.0, tied=True
    ),
    "llama-3.2-3b": _llama_3(
        hidden=3072, ffn=8192, layers=28, heads=(24, 8, 128), factor=32.0, tied=True
    ),
    "llama-3-8b": _llama_3(hidden=4096, ffn=14336, layers=32, heads=(32, 8, 128)),
    "llama-3-70b": _llama_3(hidden=8192, ffn=28672, layers=80, heads=(64, 8, 128)),
    # mistralai/Mistral-7B-v0.3, which has no window
    "mistral-7b": _config(
        "mistral",
        vocab=32768,
        hidden=4096,
        ffn=14336,
        layers=32,
        heads=(32, 8, 128),
        context=32768,
        theta=1e6,
    ),
    # Qwen/Qwen2.5-0.5B, -1.5B, -7B, -14B, -32B, -72B; biases on q, k and v
    "qwen2.5-0.5b": _qwen2(
        hidden=896, ffn=4864, layers=24, heads=(14, 2, 64), vocab=151936, context=32768, tied=True
    ),
    "qwen2.5-1.5b": _qwen2(
        hidden=1536, ffn=8960, layers=28, heads=(12, 2, 128), vocab=151936, tied=True
    ),
    "qwen2.5-7b": _qwen2(hidden=3584, ffn=18944, layers=28, heads=(28, 4, 128)),
    "qwen2.5-14b": _qwen2(hidden=5120, ffn=13824, layers=48, heads=(40, 8, 128)),
    "qwen2.5-32b": _qwen2(hidden=5120, ffn=27648, layers=64, heads=(40, 8, 128)),
    "qwen2.5-72b": _qwen2(hidden=8192, ffn=29568, layers=80, heads=(64, 8, 128)),
    # Qwen/Qwen3-0.6B, -1.7B, -4B, -8B, -14B, -32B; norms of q and k
    "qwen3-0.6b": _qwen3(hidden=1024, ffn=3072, layers=28, heads=(16, 8, 128), tied=True),
    "qwen3-1.7b": _qwen3(hidden=2048, ffn=6144, layers=28, heads=(16, 8, 128), tied=True),
    "qwen3-4b": _qwen3(hidden=2560, ffn=9728, layers=36, heads=(32, 8, 128), tied=True),
    "qwen3-8b": _qwen3(hidden=4096, ffn=12288, layers=36, heads=(32, 8, 128)),
    "qwen3-14b": _qwen3(hidden=5120, ffn=17408, layers=40, heads=(40, 8, 128)),
    "qwen3-32b": _qwen3(hidden=5120, ffn=25600, layers=64, heads=(64, 8, 128)),
    # microsoft/Phi-3-mini-4k-instruct
    "phi-3-mini": _config(
        "phi3",
        vocab=32064,
        hidden=3072,
        ffn=8192,
        layers=32,
        heads=(32, 32, 96),
        context=4096,
        theta=1e4,
        layer_windows=(2047,) * 32,
    ),
}
