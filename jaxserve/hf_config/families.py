"""What sets the families apart, as data: class names, what stands in for keys that are absent, and which
keys say which flag of `ModelConfig`.

Read by `read.py` and `layers.py`. Invariant: one entry per architecture that is served. Source: the
configuration classes of transformers 5, whose defaults a file need not repeat.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# The class defaults of LlamaConfig; None stands for what is derived from other keys.
_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_out_bias": False,
    "mlp_bias": False,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    Args:
        class_name: what config.json calls its model class.
        changed: defaults that are not Llama's.
        qkv_bias, o_bias, mlp_bias: the key that says whether there are such biases, or the answer.
        qk_norm: whether each head of q and k is normed.
        windows: who says which layers have a sliding window. "none": no layer has one; "all": every
            layer, where `sliding_window` is given, unless `layer_types` names those that have;
            "switched": the layers from `max_window_layers` on, or those that `layer_types` names, where
            `use_sliding_window` is true; "unturned": likewise, but the layers without rope.
        default_window: what `sliding_window` stands for where it is absent; null is no window.
        has_unturned_layers: whether `no_rope_layers` says which layers turn queries and keys.
        rotates_partly: whether `partial_rotary_factor` may say that a part of a head is turned.
        has_multipliers: whether Granite's four multipliers are read.
        default_original: what `original_max_position_embeddings` stands for where it is absent.
    """

    class_name: str
    changed: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: str | bool = False
    o_bias: str | bool = False
    mlp_bias: str | bool = False
    qk_norm: bool = False
    windows: Literal["none", "all", "switched", "unturned"] = "none"
    default_window: int | None = None
    has_unturned_layers: bool = False
    rotates_partly: bool = False
    has_multipliers: bool = False
    default_original: int | None = None

    def default(self, key: str) -> Any:
        """What a key stands for where it is absent."""
        return self.changed.get(key, _LLAMA[key])


_MISTRAL = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_QWEN = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
}
_SMOLLM3 = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}
_PHI3 = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_SEED_OSS = {
    "vocab_size": 155136,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        class_name="LlamaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "mistral": Family(
        class_name="MistralForCausalLM", changed=_MISTRAL, windows="all", default_window=4096
    ),
    "ministral": Family(
        class_name="MinistralForCausalLM", changed=_MISTRAL, windows="all", default_window=4096
    ),
    "qwen2": Family(
        class_name="Qwen2ForCausalLM",
        changed=_QWEN | {"num_key_value_heads": 32},
        qkv_bias=True,
        windows="switched",
        default_window=4096,
    ),
    "qwen3": Family(
        class_name="Qwen3ForCausalLM",
        changed=_QWEN | {"num_key_value_heads": 32, "head_dim": 128},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows="switched",
        default_window=4096,
    ),
    "smollm3": Family(
        class_name="SmolLM3ForCausalLM",
        changed=_SMOLLM3,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows="unturned",
        has_unturned_layers=True,
    ),
    "phi3": Family(
        class_name="Phi3ForCausalLM",
        changed=_PHI3,
        windows="all",
        rotates_partly=True,
        default_original=4096,
    ),
    "granite": Family(
        class_name="GraniteForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        has_multipliers=True,
    ),
    "seed_oss": Family(
        class_name="SeedOssForCausalLM",
        changed=_SEED_OSS,
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
}
