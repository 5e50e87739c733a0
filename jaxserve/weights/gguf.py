"""A GGUF file seen as a Hugging Face checkpoint: names, shapes, values, config and tokenizer.

`open_gguf` is called by `loader.open_checkpoint`; `fetch` writes what it gives as an ordinary directory.

The one trap: for some architectures (llama, smollm3, granite: `gguf_config.FAMILIES`) writers interleave
the rows of q and k within each head, because ggml's rope turns neighbouring dimensions (0,1), (2,3), ...
where Hugging Face turns i with i + D/2. That is undone here, per head:

    file row  2*i + h   <->   Hugging Face row  h*D/2 + i         i in [0, D/2), h in {0, 1}

with the number of query heads for q and of kv heads for k. Other architectures keep the order.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
from gguf.quants import dequantize

from jaxserve.errors import CheckpointError
from jaxserve.hf_config.read import read_hf_config
from jaxserve.model_config import ModelConfig
from jaxserve.weights.checkpoint import Checkpoint, TensorInfo
from jaxserve.weights.gguf_config import (
    ROPE_TENSORS,
    GGUFFamily,
    family_of,
    hf_config_of,
    special_ids,
)
from jaxserve.weights.gguf_file import GGUFFile, GGUFTensor, read_gguf
from jaxserve.weights.gguf_tokenizer import chat_template, tokenizer_config, tokenizer_json
from jaxserve.weights.name_maps import hf_name_of_gguf

_JOINED_LENGTH = 2**14  # elements; 16 such rows in f32 are 1 MiB, and stay in a core's cache
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
    hf_config = hf_config_of(file, lambda tensor: _floats(file, tensor))
    generation_config = special_ids(file.metadata)
    config = read_hf_config(hf_config, generation_config, str(path))
    return Checkpoint(
        path=path,
        config=config,
        source=GGUFSource(file, config, family_of(file)),
        tokenizer_json=tokenizer_json(path, file.metadata),
        tokenizer_config=tokenizer_config(path, file.metadata, config.max_position_embeddings),
        generation_config=generation_config,
        chat_template=chat_template(path, file.metadata),
        hf_config=hf_config,
    )


class GGUFSource:
    """The tensors of a GGUF file, dequantised to f32 as they are read; a `TensorSource`."""

    readable_dtypes = ", ".join(sorted(READABLE))

    def __init__(self, file: GGUFFile, config: ModelConfig, family: GGUFFamily):
        self._file = file
        self._num_heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        self._interleaved = family.interleaved
        self._tensors: dict[str, GGUFTensor] = {}
        for name, tensor in file.tensors.items():
            if name not in ROPE_TENSORS:  # already part of the config
                # A tensor without a Hugging Face name keeps its own; load_params then refuses it by
                # that name.
                hf_name = hf_name_of_gguf(name, family.model_type) or name
                if hf_name in self._tensors:
                    other = self._tensors[hf_name].name
                    raise CheckpointError(
                        f"{file.path}: tensors {other!r} and {name!r} are the same one of the model"
                    )
                self._tensors[hf_name] = tensor

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by Hugging Face name."""
        return self._infos

    @cached_property
    def _infos(self) -> dict[str, TensorInfo]:
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
