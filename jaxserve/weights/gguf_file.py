"""The GGUF container: metadata and tensor table of one file, every read checked against the file's size.

Used by `gguf.py`. The `gguf` package gives the type tables and the dequantisation; the container is
parsed here, since its own reader takes lengths on trust: a truncated or hostile file would read
zeros or loop for ever.

    | "GGUF" version num_tensors num_pairs | key-value pairs | tensor table | padding | data |

Every tensor in the data begins at a multiple of general.alignment (32 where it is not given).

Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from jaxserve.errors import CheckpointError
from jaxserve.weights.safetensors import what_it_looks_like

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """One row of the tensor table.

    Args:
        name: GGUF name ("blk.0.attn_q.weight").
        kind: element type of the file, maybe quantised.
        shape: numpy order ([out, in]); the file stores it reversed.
        begin: byte offset in the file.
        num_bytes: stored size.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class GGUFFile:
    """The parsed head of a GGUF file: metadata values as Python objects, tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def raw(self, tensor: GGUFTensor) -> np.ndarray:
        """The stored bytes, u8[num_bytes], as a read-only view of the mapped file."""
        view = np.memmap(
            self.path, np.uint8, mode="r", offset=tensor.begin, shape=(tensor.num_bytes,)
        )
        return np.asarray(view)


class _Cursor:
    """Reads little-endian values from the mapped file and never past its end."""

    def __init__(self, path: Path, data: np.ndarray):
        self.path, self.data, self.position = path, data, 0

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message} at byte {self.position}")

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise self.error(
                f"truncated: {num_bytes} bytes wanted, {len(self.data) - self.position} left,"
            )
        raw = self.data[self.position : end].tobytes()
        self.position = end
        return raw

    def u32(self) -> int:
        return struct.unpack("<I", self.take(4))[0]

    def u64(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]

    def text(self) -> str:
        raw = self.take(self.u64())
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error("a string that is not UTF-8 ends") from None

    def value_type(self) -> GGUFValueType:
        number = self.u32()
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self.error(f"unknown value type {number}") from None

    def value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            return self.array()
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def array(self) -> list[Any]:
        kind, length = self.value_type(), self.u64()
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self.take(length * dtype.itemsize), dtype).tolist()
        if kind == GGUFValueType.ARRAY:
            raise self.error("arrays of arrays are not read; one stands")
        if length * 8 > len(self.data):  # every string takes 8 bytes or more
            raise self.error(f"truncated: an array of {length} strings")
        return [self.text() for _ in range(length)]


def read_gguf(path: Path) -> GGUFFile:
    """Reads the metadata and the tensor table of a GGUF file and checks them against its size.

    Raises:
        CheckpointError: not GGUF, an unknown version or type, truncated, or tensors outside the file.
    """
    size = path.stat().st_size
    kind = what_it_looks_like(path)
    if kind != "a GGUF file" or size < 24:
        raise CheckpointError(
            f"{path}: expected a GGUF file, found {kind or 'something else'} ({size} bytes)"
        )
    cursor = _Cursor(path, np.asarray(np.memmap(path, np.uint8, mode="r")))
    cursor.take(4)
    version = cursor.u32()
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{path}: GGUF version must be one of {_VERSIONS} in little-endian order, found {version}"
        )
    num_tensors, num_pairs = cursor.u64(), cursor.u64()
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.text()
        if key in metadata:
            raise CheckpointError(f"{path}: metadata key {key!r} stands twice")
        metadata[key] = cursor.value(cursor.value_type())
    rows = [_tensor_row(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(
            f"{path}: general.alignment must be an integer >= 1, got {alignment!r}"
        )
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, tensor_kind, shape, offset in rows:
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {name!r} stands twice in the table")
        tensors[name] = _place(path, name, tensor_kind, shape, start + offset, size)
    _check_apart(path, tensors)
    return GGUFFile(path=path, metadata=metadata, tensors=tensors)


def _tensor_row(cursor: _Cursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    name = cursor.text()
    num_dims = cursor.u32()
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.error(
            f"tensor {name!r}: number of dimensions must be in [1, {_MAX_DIMS}], got {num_dims}"
        )
    shape = tuple(cursor.u64() for _ in range(num_dims))[::-1]
    number = cursor.u32()
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise cursor.error(f"tensor {name!r}: unknown element type {number}") from None
    return name, kind, shape, cursor.u64()


def _place(
    path: Path, name: str, kind: GGMLQuantizationType, shape: tuple[int, ...], begin: int, size: int
) -> GGUFTensor:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise CheckpointError(
            f"{path}: tensor {name!r}: rows of {kind.name} must be a multiple of {block} long,"
            f" found {shape[-1]}"
        )
    num_bytes = shape[-1] // block * block_bytes
    for n in shape[:-1]:  # Python ints: a product that overflows 64 bits cannot wrap to a small one
        num_bytes *= n
    if begin + num_bytes > size:
        raise CheckpointError(
            f"{path}: tensor {name!r} ends at byte {begin + num_bytes}, the file has {size}: truncated"
        )
    return GGUFTensor(name=name, kind=kind, shape=shape, begin=begin, num_bytes=num_bytes)


def _check_apart(path: Path, tensors: Mapping[str, GGUFTensor]) -> None:
    end, previous = 0, ""
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.num_bytes)):
        if tensor.begin < end:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} begins at byte {tensor.begin},"
                f" inside {previous!r} which ends at {end}"
            )
        end, previous = tensor.begin + tensor.num_bytes, tensor.name
