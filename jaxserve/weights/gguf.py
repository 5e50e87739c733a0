"""A GGUF file seen as a Hugging Face checkpoint: names, shapes, values, config and tokenizer.

`open_gguf` is called by `loader.open_checkpoint`; `fetch` writes what it gives as an ordinary directory.

The one trap: writers for the llama architecture interleave the rows of q and k within each head,
because ggml's rope turns neighbouring dimensions (0,1), (2,3), ... where Hugging Face turns i with
i + D/2. That is undone here, per head:

    file row  2*i + h   <->   Hugging Face row  h*D/2 + i         i in [0, D/2), h in {0, 1}

with the number of query heads for q and of kv heads for k. Other architectures keep the order; they
are not served yet.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import dequantize

from jaxserve.errors import CheckpointError
from jaxserve.hf_config.read import read_hf_config
from jaxserve.model_config import ModelConfig
from jaxserve.weights.checkpoint import Checkpoint, TensorInfo
from jaxserve.weights.gguf_file import GGUFFile, GGUFTensor, read_gguf
from jaxserve.weights.gguf_tokenizer import chat_template, tokenizer_config, tokenizer_json
from jaxserve.weights.name_maps import hf_name_of_gguf

_JOINED_LENGTH = 2**14  # elements; 16 such rows in f32 are 1 MiB, and stay in a core's cache
ROPE_FACTORS = "rope_freqs.weight"
# Architectures that are read, and whether their writers interleave the rows of q and k.
_INTERLEAVED = {"llama": True}
# What gguf.quants turns into floats; the rest (integers, F64, the activation types Q8_1 and Q8_K)
# is refused by name.
READABLE = frozenset(
    {"F32", "F16", "BF16", "MXFP4"}
    | {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    | {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"}
    | {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"}
)


def open_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF file; reads the metadata and the tensor table only.

    Raises:
        CheckpointError: damaged, an architecture, tokenizer or rope scaling that is not served.
    """
    file = read_gguf(path)
    hf_config = hf_config_of(file)
    generation_config = _special_ids(file.metadata)
    config = read_hf_config(hf_config, generation_config, str(path))
    return Checkpoint(
        path=path,
        config=config,
        source=GGUFSource(file, config),
        tokenizer_json=tokenizer_json(path, file.metadata),
        tokenizer_config=tokenizer_config(path, file.metadata, config.max_position_embeddings),
        generation_config=generation_config,
        chat_template=chat_template(path, file.metadata),
        hf_config=hf_config,
    )


class GGUFSource:
    """The tensors of a GGUF file, dequantised to f32 as they are read; a `TensorSource`."""

    readable_dtypes = ", ".join(sorted(READABLE))

    def __init__(self, file: GGUFFile, config: ModelConfig):
        self._file = file
        self._num_heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        self._interleaved = _INTERLEAVED[config.architecture]
        self._tensors: dict[str, GGUFTensor] = {}
        for name, tensor in file.tensors.items():
            if name != ROPE_FACTORS:  # already part of the config
                # A tensor without a Hugging Face name keeps its own; load_params then refuses it by
                # that name.
                self._tensors[hf_name_of_gguf(name) or name] = tensor

    @cached_property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by Hugging Face name."""
        return {
            name: TensorInfo(
                name=name,
                file=self._file.path,
                dtype=tensor.kind.name,
                shape=tensor.shape,
                readable=tensor.kind.name in READABLE,
                block_rows=self._head_rows(name) or 1,
            )
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows in f32, those of q and k in Hugging Face order: of whole heads, so."""
        array = _floats(self._file, self._tensors[name], begin, end)
        head_rows = self._head_rows(name)
        return undo_interleave(array, len(array) // head_rows) if head_rows else array

    def _head_rows(self, name: str) -> int | None:
        """Rows of a head, if those of this tensor are interleaved."""
        module = name.split(".")[-2] if "." in name else ""
        if not self._interleaved or module not in self._num_heads:
            return None
        return self._tensors[name].shape[0] // self._num_heads[module]


def undo_interleave(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Puts the rows of a q or k projection or bias, [num_heads * D, ...], into Hugging Face order."""
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _floats(
    file: GGUFFile, tensor: GGUFTensor, begin: int = 0, end: int | None = None
) -> np.ndarray:
    if tensor.kind.name not in READABLE:
        raise CheckpointError(
            f"{file.path}: tensor {tensor.name!r}: dtype must be one of {', '.join(sorted(READABLE))},"
            f" found {tensor.kind.name}"
        )
    *outer, row_length = tensor.shape
    raw = file.raw(tensor).reshape(math.prod(outer), -1)  # blocks never straddle rows
    if not outer:  # a bias or a norm: its elements are the rows
        return dequantize(raw, tensor.kind).reshape(row_length)[begin:end]
    stride = math.prod(outer[1:])
    begin, end, _ = slice(begin, end).indices(outer[0])
    raw, outer[0] = raw[begin * stride : end * stride], max(0, end - begin)
    joined = _rows_to_join(len(raw), row_length)
    rows = raw.reshape(len(raw) // joined, -1)
    return dequantize(rows, tensor.kind).reshape(*outer, row_length)


def _rows_to_join(num_rows: int, row_length: int) -> int:
    """How many rows to hand to `dequantize` as one: it turns 16 at a time in Python, which keeps other
    threads from running where rows are short. Blocks never straddle rows, so any number will do.
    """
    most = max(1, _JOINED_LENGTH // row_length)
    return max(n for n in range(1, min(most, num_rows) + 1) if num_rows % n == 0)


class _Metadata:
    """Metadata of one architecture; reads `llama.block_count` as `block_count` and checks the type."""

    def __init__(self, file: GGUFFile, architecture: str):
        self.path, self.values, self.architecture = file.path, file.metadata, architecture

    def get(self, key: str) -> Any:
        return self.values.get(f"{self.architecture}.{key}")

    def error(self, key: str, limit: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {self.architecture}.{key} must be {limit}, got {self.get(key)!r}"
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
        # The shortest decimal that names the same f32: the file's 9.99999975e-06 was 1e-05 in the
        # config it came from.
        return float(str(np.float32(value)))


def hf_config_of(file: GGUFFile) -> dict[str, Any]:
    """The config.json that belongs to a GGUF file.

    Raises:
        CheckpointError: an architecture that is not read, or metadata that no config of it can express.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in _INTERLEAVED:
        raise CheckpointError(
            f"{file.path}: general.architecture must be one of {', '.join(_INTERLEAVED)},"
            f" got {architecture!r}"
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{file.path}: split.count must be 1 (one file), got {file.metadata['split.count']}"
        )
    metadata = _Metadata(file, architecture)
    if metadata.integer("expert_count", 0):
        raise metadata.error("expert_count", "0 (mixtures of experts are not served)")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    hidden_size, num_heads = (
        metadata.integer("embedding_length"),
        metadata.integer("attention.head_count"),
    )
    head_dim = metadata.integer("attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(key, head_dim) != head_dim:
            raise metadata.error(key, f"the head size ({head_dim})")
    theta = metadata.real("rope.freq_base", 10000.0)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, metadata, theta, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "float32",
    }
    return config | _special_ids(file.metadata)


def _rope_scaling(
    file: GGUFFile, metadata: _Metadata, theta: float, head_dim: int
) -> dict[str, Any] | None:
    kind = metadata.get("rope.scaling.type") or "none"
    if kind not in ("none", "linear"):
        raise metadata.error("rope.scaling.type", "'none' or 'linear'")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise metadata.error("rope.scaling.type", f"'none' beside {ROPE_FACTORS}")
        return _llama3_scaling(file, theta, head_dim)
    old_factor = metadata.real("rope.scale_linear", 1.0)
    if kind == "none" and old_factor == 1.0:
        return None
    return {"rope_type": "linear", "factor": metadata.real("rope.scaling.factor", old_factor)}


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Recovers the llama3 parameters from the per-frequency divisors that GGUF stores in their place.

    Every published model uses low 1, high 4 and 8192; only the factor differs and is the largest divisor. The
    divisors are computed again from these, and the file is refused if they are not the same.
    """
    tensor = file.tensors[ROPE_FACTORS]
    stored = _floats(file, tensor).reshape(-1)
    factor = float(stored.max()) if stored.size else 1.0
    low, high, context = 1.0, 4.0, 8192
    turns = context / (2 * np.pi) / theta ** (np.arange(0, head_dim, 2) / head_dim)
    share = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - share) / factor + share)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_FACTORS!r} must hold the llama3 divisors for low 1, high 4"
            f" and context {context} ({expected.size} values), found {stored.size} others"
        )
    if factor == 1.0:
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
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
