"""Writes checkpoints as GGUF files with the `gguf` package's own writer and table of tensor names, the way
the conversion of llama.cpp does: an independent description of what `weights.gguf` reads.

Source: convert_hf_to_gguf.py of https://github.com/ggml-org/llama.cpp.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxserve.model_config import ModelConfig
from jaxserve.weights.checkpoint import Checkpoint

# Architectures whose rope turns neighbouring dimensions in ggml.
INTERLEAVED = ("llama", "smollm3", "granite")
# A Hugging Face model_type whose files have another general.architecture.
WRITTEN_AS = {"mistral": "llama"}
_ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}

Kinds = Callable[[str, tuple[int, ...]], gguf.GGMLQuantizationType]


def can_be_written(config: ModelConfig) -> bool:
    """Whether the format has keys for all that a config says: none of layers without rope that are not
    every fourth, of theta that grows with the text, of a ramp of yarn that begins between dimensions."""
    every_fourth = tuple((layer + 1) % 4 != 0 for layer in range(config.num_layers))
    return (
        config.architecture != "ministral"
        and config.rope_layers in (None, every_fourth)
        and config.rope.rope_type != "dynamic"
        and config.rope.truncate
    )


def interleave(array: np.ndarray, num_heads: int) -> np.ndarray:
    """As the llama converter of llama.cpp writes q and k."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def write_gguf(
    path: Path,
    model: Checkpoint,
    *,
    architecture: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    kinds: Kinds | None = None,
) -> Path:
    """Writes a checkpoint.

    Args:
        path: of the file.
        model: Hugging Face tensors and their config.
        architecture: general.architecture; None: that of the config's family.
        metadata: adds keys and replaces values.
        extra: more tensors, by GGUF name.
        kinds: element type by GGUF name and shape; None: f32.

    Returns:
        path.
    """
    config = model.config
    architecture = architecture or WRITTEN_AS.get(config.architecture, config.architecture)
    writer = gguf.GGUFWriter(path, architecture)
    values = {f"{architecture}.{key}": value for key, value in _values(config).items()}
    for key, value in (values | dict(metadata or {})).items():
        _add(writer, key, value)
    tensors = {**_tensors(model, architecture), **_rope_tensors(config), **(extra or {})}
    for name, array in tensors.items():
        kind = kinds(name, array.shape) if kinds else None
        array = np.ascontiguousarray(array)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _tensors(model: Checkpoint, architecture: str) -> dict[str, np.ndarray]:
    """By GGUF name, in the order of rows that the architecture's files have."""
    config = model.config
    family = WRITTEN_AS.get(config.architecture, config.architecture)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[family], config.num_layers)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    found = {}
    for name, array in model.tensors():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, f"{architecture} has no name for {name}"
        module = name.split(".")[-2]
        if architecture in INTERLEAVED and module in heads:
            array = interleave(array, heads[module])
        found[gguf_name] = array
    return found


def _values(config: ModelConfig) -> dict[str, Any]:
    """Metadata without the architecture before their keys."""
    turned = int(config.head_dim * config.rope.partial_rotary_factor)
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": turned,
        "rope.freq_base": config.rope.theta,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if config.architecture == "phi3":
        original = config.rope.original_max_position_embeddings or config.max_position_embeddings
        values |= {"rope.scaling.original_context_length": original, "attention.sliding_window": 0}
    if config.architecture == "granite":
        values |= {
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "attention.scale": config.attention_scale,
            "logit_scale": config.logits_scaling,
        }
    return values | _windows(config) | _scaling(config)


def _windows(config: ModelConfig) -> dict[str, Any]:
    windows = config.layer_windows
    if windows is None:
        return {}
    found: dict[str, Any] = {"attention.sliding_window": max(w for w in windows if w is not None)}
    if config.architecture not in ("mistral", "phi3"):
        found["attention.sliding_window_pattern"] = [w is not None for w in windows]
    return found


def _scaling(config: ModelConfig) -> dict[str, Any]:
    rope = config.rope
    if rope.rope_type == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
    if rope.rope_type == "longrope":
        return {"rope.scaling.attn_factor": rope.attention_factor}
    if rope.rope_type != "yarn":
        return {}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope.factor,
        "rope.scaling.original_context_length": rope.original_max_position_embeddings,
        "rope.scaling.yarn_beta_fast": rope.beta_fast,
        "rope.scaling.yarn_beta_slow": rope.beta_slow,
        "rope.scaling.attn_factor": rope.attention_factor / (0.1 * math.log(rope.factor) + 1),
    }


def _rope_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    rope = config.rope
    if rope.rope_type == "longrope":
        return {
            "rope_factors_long.weight": np.array(rope.long_factors, np.float32),
            "rope_factors_short.weight": np.array(rope.short_factors, np.float32),
        }
    if rope.rope_type != "llama3":
        return {}
    turns = np.array(rope.original_max_position_embeddings) / (2 * np.pi)
    turns = turns / rope.theta ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    share = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - share) / rope.factor + share)).astype(np.float32)}
