"""The config.json that belongs to a GGUF file, from its metadata and the names of its tensors.

Called by `gguf.open_gguf`. What a GGUF file states otherwise than config.json does is translated here:
a family by general.architecture, windows by a length and a pattern, frequencies of rope by tensors of
divisors. What the metadata says and no config can express is refused by its key.

Source: the writers in `gguf` and the conversion of llama.cpp, https://github.com/ggml-org/llama.cpp.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError, shown
from jaxserve.weights.gguf_file import GGUFFile, GGUFTensor

# Divisors of rope's frequencies; part of the config, not of the params.
ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG = "rope_factors_long.weight"
ROPE_SHORT = "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)

ReadTensor = Callable[[GGUFTensor], np.ndarray]  # in f32


@dataclass(frozen=True, kw_only=True)
class GGUFFamily:
    """How files of one general.architecture are written.

    Args:
        model_type, class_name: of the Hugging Face config.
        interleaved: whether writers interleave the rows of q and k (see `gguf`).
    """

    model_type: str
    class_name: str
    interleaved: bool = False


# By general.architecture. Interleaved are those whose rope turns neighbouring dimensions in ggml
# (LLAMA_ROPE_TYPE_NORM); the others turn i with i + D/2, as Hugging Face does.
FAMILIES = {
    "llama": GGUFFamily(model_type="llama", class_name="LlamaForCausalLM", interleaved=True),
    "qwen2": GGUFFamily(model_type="qwen2", class_name="Qwen2ForCausalLM"),
    "qwen3": GGUFFamily(model_type="qwen3", class_name="Qwen3ForCausalLM"),
    "phi3": GGUFFamily(model_type="phi3", class_name="Phi3ForCausalLM"),
    "smollm3": GGUFFamily(model_type="smollm3", class_name="SmolLM3ForCausalLM", interleaved=True),
    "granite": GGUFFamily(model_type="granite", class_name="GraniteForCausalLM", interleaved=True),
    "seed_oss": GGUFFamily(model_type="seed_oss", class_name="SeedOssForCausalLM"),
}
_MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
# Files do not say which layers of SmolLM3 go without rope; writer and reader take every fourth.
_SMOLLM3_INTERVAL = 4
_GRANITE_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
# Settings of yarn that only other families' files have, and what they must be where they stand.
_FIXED_YARN = {
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


def family_of(file: GGUFFile) -> GGUFFamily:
    """The family of a file.

    Raises:
        CheckpointError: an architecture that is not read, or a file that is one of several.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise CheckpointError(
            f"{file.path}: general.architecture must be one of {', '.join(FAMILIES)},"
            f" got {shown(architecture)}"
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{file.path}: split.count must be 1 (one file), got {file.metadata['split.count']}"
        )
    return FAMILIES[architecture]


def hf_config_of(file: GGUFFile, read: ReadTensor) -> dict[str, Any]:
    """The config.json that belongs to a GGUF file.

    Args:
        file: its metadata and tensor table.
        read: gives the floats of a tensor.

    Raises:
        CheckpointError: an architecture that is not read, or metadata that no config of it can express.
    """
    family = family_of(file)
    metadata = _Metadata(file, file.metadata["general.architecture"])
    if metadata.integer("expert_count", 0):
        raise metadata.error("expert_count", "0 (mixtures of experts are not served)")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    hidden_size = metadata.integer("embedding_length")
    num_heads = metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", hidden_size // max(num_heads, 1))
    if metadata.integer("attention.value_length", head_dim) != head_dim:
        raise metadata.error("attention.value_length", f"the head size ({head_dim})")
    config = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.real("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "float32",
    }
    config |= _of_family(file, metadata, family.model_type, head_dim)
    config |= _windows(metadata, config)
    config |= _rope(file, metadata, config, read)
    return config | special_ids(file.metadata)


def _of_family(
    file: GGUFFile, metadata: "_Metadata", model_type: str, head_dim: int
) -> dict[str, Any]:
    if model_type in ("qwen2", "phi3"):
        return {}
    biases = {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    if model_type == "qwen3":
        return biases
    biases["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    if model_type == "seed_oss":
        return biases | {"attention_out_bias": "blk.0.attn_output.bias" in file.tensors}
    if model_type == "smollm3":
        return biases | {"no_rope_layer_interval": _SMOLLM3_INTERVAL}
    if model_type == "granite":
        scales = {key: metadata.real(name, 1.0) for key, name in _GRANITE_SCALES.items()}
        scales["attention_multiplier"] = metadata.real("attention.scale", head_dim**-0.5)
        return biases | scales
    return biases


def _windows(metadata: "_Metadata", config: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers see only a window: all of them, or those that a pattern of booleans names."""
    window = metadata.integer("attention.sliding_window", 0)
    if not 0 < window < config["max_position_embeddings"]:
        return {}
    model_type, pattern = config["model_type"], metadata.get("attention.sliding_window_pattern")
    if pattern is None and model_type == "phi3":
        return {"sliding_window": window}
    if (
        pattern is None
        and model_type == "llama"
        and not (config["attention_bias"] or config["mlp_bias"])
    ):
        return _MISTRAL | {"sliding_window": window}
    if not (
        model_type in ("qwen2", "qwen3", "smollm3")
        and isinstance(pattern, list)
        and all(isinstance(one, bool) for one in pattern)
    ):
        raise metadata.error(
            "attention.sliding_window",
            f"0 for this family, or >= context_length ({config['max_position_embeddings']}),"
            " or beside a sliding_window_pattern of booleans (qwen2, qwen3, smollm3)",
        )
    types = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": types}


def _rope(
    file: GGUFFile, metadata: "_Metadata", config: Mapping[str, Any], read: ReadTensor
) -> dict[str, Any]:
    head_dim, context = config["head_dim"], config["max_position_embeddings"]
    turned = metadata.integer("rope.dimension_count", head_dim)
    found: dict[str, Any] = {}
    if config["model_type"] == "phi3":
        if not 0 < turned <= head_dim:
            raise metadata.error("rope.dimension_count", f"in [1, {head_dim}] (the head size)")
        original = metadata.integer("rope.scaling.original_context_length", context)
        found["original_max_position_embeddings"] = original
        if turned != head_dim:
            found["partial_rotary_factor"] = _share(turned, head_dim)
    elif turned != head_dim:
        raise metadata.error("rope.dimension_count", f"the head size ({head_dim})")
    return found | {"rope_scaling": _rope_scaling(file, metadata, config, read)}


def _share(turned: int, head_dim: int) -> float:
    """turned / head_dim as a number that gives `turned` again when it is multiplied and cut."""
    share = turned / head_dim
    return share if int(head_dim * share) == turned else math.nextafter(share, 2)


def _rope_scaling(
    file: GGUFFile, metadata: "_Metadata", config: Mapping[str, Any], read: ReadTensor
) -> dict[str, Any] | None:
    """What the metadata say of scaling, or the divisors that stand for it."""
    kind = metadata.get("rope.scaling.type") or "none"
    tensors = [name for name in ROPE_TENSORS if name in file.tensors]
    if tensors and kind not in ("none", "longrope"):
        raise metadata.error("rope.scaling.type", f"'none' or 'longrope' beside {tensors[0]}")
    context = config["max_position_embeddings"]
    if ROPE_FREQS in tensors:
        divisors = read(file.tensors[ROPE_FREQS]).reshape(-1)
        return _scaling_of_divisors(divisors, config["rope_theta"], context)
    if tensors:
        return _longrope(file, metadata, context, read)
    if kind == "yarn":
        return _yarn(metadata, context)
    old_factor = metadata.real("rope.scale_linear", 1.0)
    if kind == "linear" or (kind == "none" and old_factor != 1.0):
        return {"rope_type": "linear", "factor": metadata.real("rope.scaling.factor", old_factor)}
    if kind != "none":
        raise metadata.error(
            "rope.scaling.type", f"'none', 'linear', 'yarn', or 'longrope' beside {ROPE_LONG}"
        )
    return None


def _yarn(metadata: "_Metadata", context: int) -> dict[str, Any]:
    for key, value in _FIXED_YARN.items():
        if metadata.real(key, value) != value:
            raise metadata.error(key, f"{value} or absent")
    factor = metadata.real("rope.scaling.factor")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.integer(
            "rope.scaling.original_context_length", context
        ),
    }
    for key in ("beta_fast", "beta_slow"):
        if metadata.get(f"rope.scaling.yarn_{key}") is not None:
            scaling[key] = metadata.real(f"rope.scaling.yarn_{key}")
    more = metadata.real("rope.scaling.attn_factor", 1.0)
    if more != 1.0:  # ggml multiplies its own factor, which is that of Hugging Face, by it
        scaling["attention_factor"] = more * (1.0 + 0.1 * math.log(max(factor, 1.0)))
    return scaling


def _longrope(
    file: GGUFFile, metadata: "_Metadata", context: int, read: ReadTensor
) -> dict[str, Any]:
    factors = {}
    for key, name in (("short_factor", ROPE_SHORT), ("long_factor", ROPE_LONG)):
        if name not in file.tensors:
            raise CheckpointError(f"{file.path}: tensor {name!r} is missing beside the other one")
        factors[key] = _decimals(read(file.tensors[name]).reshape(-1))
    return {
        "rope_type": "longrope",
        **factors,
        "original_max_position_embeddings": metadata.integer(
            "rope.scaling.original_context_length", context
        ),
        "attention_factor": metadata.real("rope.scaling.attn_factor", 1.0),
    }


def _scaling_of_divisors(divisors: np.ndarray, theta: float, context: int) -> dict[str, Any] | None:
    """The config for divisors of every frequency, f32[D/2], which stand for the parameters of llama3.

    Every published model has low 1, high 4 and 8192, only the factor differs and is the largest
    divisor; where these give the same divisors, so says the config. Others are kept as they are, as
    longrope with the same factors for texts of any length.
    """
    if divisors.size and np.all(divisors == 1):
        return None
    factor = float(divisors.max()) if divisors.size else 1.0
    low, high, original = 1.0, 4.0, 8192
    turns = original / (2 * np.pi) / theta ** (np.arange(divisors.size) / max(divisors.size, 1))
    share = np.clip((turns - low) / (high - low), 0, 1)
    if np.allclose(divisors, 1 / ((1 - share) / factor + share), rtol=1e-4):
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    factors = _decimals(divisors)
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": context,
        "attention_factor": 1.0,
    }


class _Metadata:
    """Metadata of one architecture; reads `llama.block_count` as `block_count` and checks the type."""

    def __init__(self, file: GGUFFile, architecture: str):
        self.path, self.values, self.architecture = file.path, file.metadata, architecture

    def get(self, key: str) -> Any:
        return self.values.get(f"{self.architecture}.{key}")

    def error(self, key: str, limit: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {self.architecture}.{key} must be {limit}, got {shown(self.get(key))}"
        )

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, "an integer")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, float):
            raise self.error(key, "a float")
        return _decimal(value)


def _decimal(value: float) -> float:
    """The shortest decimal that names the same f32: the file's 9.99999975e-06 was 1e-05 in the config it
    came from.
    """
    return float(str(np.float32(value)))


def _decimals(values: np.ndarray) -> list[float]:
    return [_decimal(value) for value in values.tolist()]


def special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """End, begin and padding ids as generation_config.json states them."""
    end_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [
        metadata[f"tokenizer.ggml.{key}"] for key in end_keys if f"tokenizer.ggml.{key}" in metadata
    ]
    ends = list(dict.fromkeys(ends))
    ids: dict[str, Any] = {}
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    for key, gguf_key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if f"tokenizer.ggml.{gguf_key}" in metadata:
            ids[key] = metadata[f"tokenizer.ggml.{gguf_key}"]
    return ids
