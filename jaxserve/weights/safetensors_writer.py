"""Writes *.safetensors, one file or several with an index, a block of a tensor at a time.

Called by `hf_directory` and `convert`. Names, shapes and dtypes are known before any value is, so the
header and the shards are laid out first; then each tensor goes through memory in small blocks, however
large it is. The layout is that of `safetensors`, which reads it.

Invariant: within a file the tensors lie back to back, those of wider elements first, so that each
begins at a multiple of its element's size, and then by name: the same tensors make the same bytes as
with the `safetensors` library.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.weights.safetensors import INDEX_NAME

MAX_SHARD_BYTES = 4 << 30
_WORDS = {
    np.dtype(kind): word
    for kind, word in (
        (np.float32, "F32"),
        (np.float16, "F16"),
        (ml_dtypes.bfloat16, "BF16"),
        (np.float64, "F64"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
        (ml_dtypes.float8_e5m2, "F8_E5M2"),
        (np.int64, "I64"),
        (np.int32, "I32"),
        (np.int16, "I16"),
        (np.int8, "I8"),
        (np.uint64, "U64"),
        (np.uint32, "U32"),
        (np.uint16, "U16"),
        (np.uint8, "U8"),
        (np.bool_, "BOOL"),
    )
}
_ALIGNMENT = 8  # of the data section


@dataclass(frozen=True, kw_only=True)
class UnwrittenTensor:
    """A tensor that is read as it is written.

    Args:
        name: in the file.
        dtype, shape: of the whole.
        blocks: its elements in C order, in pieces that follow each other.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[np.ndarray]]

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return self.dtype.itemsize * math.prod(self.shape)


def unwritten(tensors: Mapping[str, np.ndarray]) -> list[UnwrittenTensor]:
    """Arrays in memory."""

    def one(name: str, array: np.ndarray) -> UnwrittenTensor:
        return UnwrittenTensor(
            name=name, dtype=array.dtype, shape=array.shape, blocks=lambda: [array]
        )

    return [one(name, array) for name, array in tensors.items()]


def write_shards(
    directory: Path,
    tensors: Sequence[UnwrittenTensor],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes model.safetensors, or several shards and their index.

    Args:
        directory: there already.
        tensors: in the order in which they go to the shards.
        max_shard_bytes: a new shard begins when the next tensor would pass this.

    Raises:
        CheckpointError: a tensor gave other elements than it said.
        OSError: it cannot be written.
    """
    shards = list(_split(tensors, max_shard_bytes))
    if len(shards) == 1:
        write_file(directory / "model.safetensors", shards[0])
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(directory / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    total = sum(tensor.num_bytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(
        json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _split(
    tensors: Sequence[UnwrittenTensor], max_shard_bytes: int
) -> Iterator[list[UnwrittenTensor]]:
    shard: list[UnwrittenTensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.num_bytes > max_shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.num_bytes
    yield shard


def write_file(path: Path, tensors: Iterable[UnwrittenTensor]) -> None:
    """Writes one file.

    Raises:
        CheckpointError: a tensor gave other elements than it said.
        OSError: it cannot be written.
    """
    in_order = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    with path.open("wb") as file:
        file.write(_header(in_order))
        for tensor in in_order:
            _write_tensor(file, tensor)


def _header(tensors: Iterable[UnwrittenTensor]) -> bytes:
    rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.num_bytes
        rows[tensor.name] = {
            "dtype": _WORDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(file: BinaryIO, tensor: UnwrittenTensor) -> None:
    written = 0
    for block in tensor.blocks():
        if block.dtype != tensor.dtype:
            raise CheckpointError(
                f"tensor {tensor.name!r}: expected blocks of {tensor.dtype}, got {block.dtype}"
            )
        # The buffer as it lies would store a transposed view scrambled.
        file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
        written += block.nbytes
    if written != tensor.num_bytes:
        raise CheckpointError(
            f"tensor {tensor.name!r}: expected {tensor.num_bytes} bytes, got {written}"
        )
