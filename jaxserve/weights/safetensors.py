"""Reads *.safetensors, one file or many shards, without copying and without torch.

Used by `hf_directory.py`. The `safetensors` library writes our files; reading is done here, on the
documented layout, for two reasons: a fault is reported with file, tensor, expected and found, and a
tensor is a view of the mapped file.

    | 8 bytes: n, little endian | n bytes: JSON header | data: tensors back to back |

The header gives each tensor's dtype, shape and [begin, end) within the data.

Invariant: every byte of the data section belongs to exactly one tensor and the section ends where
the file ends, so a truncated or padded file is refused before anything is read.

Source: the safetensors format, https://github.com/huggingface/safetensors#format
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError, shown
from jaxserve.weights.checkpoint import TensorInfo

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_READABLE = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8},
    **{
        "F8_E5M2FNUZ": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
    },
    **{"I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64},
}
_SHARD_NAME = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.safetensors")
# A length below 4 GiB and a JSON object. Lengths are bytes like any others: 640 begins as a pickle, 15,392
# as a page of HTML.
_BEGINNING = re.compile(rb"[\x00-\xff]{4}\0\0\0\0\{", re.DOTALL)
# First bytes of what people rename to .safetensors, and what it is.
_LOOKALIKES = (
    (re.compile(rb"PK\x03\x04"), "a zip archive, as torch.save writes it"),
    (re.compile(rb"\x80[\x02-\x05]"), "a pickle"),
    (re.compile(rb"GGUF"), "a GGUF file"),
    (re.compile(rb"version https://git-lfs"), "a Git LFS pointer: the weights were not downloaded"),
    (re.compile(rb"\x89HDF"), "an HDF5 file"),
    (re.compile(rb"\x1f\x8b"), "a gzip archive"),
    (re.compile(rb"\s*<"), "an HTML or XML page"),
)


def what_it_looks_like(path: Path) -> str | None:
    """Names the kind of file by its first bytes ("a pickle"), or None when they say nothing."""
    with path.open("rb") as file:
        start = file.read(64)
    if _BEGINNING.match(start):
        return None
    return next((kind for pattern, kind in _LOOKALIKES if pattern.match(start)), None)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One tensor's row of a header; begin and end are byte offsets into the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, _Entry]:
    """Reads and checks the header of one file.

    Returns:
        The tensors by name, offsets counted from the start of the file.

    Raises:
        CheckpointError: not a safetensors file, truncated, or its offsets do not cover the data exactly.
    """
    size = path.stat().st_size
    kind = what_it_looks_like(path)
    if kind is not None:
        raise CheckpointError(f"{path}: expected a safetensors file, found {kind}")
    if size < 8:
        raise CheckpointError(
            f"{path}: expected a safetensors file (8 bytes or more), found {size} bytes"
        )
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{path}: the header says it is {length} bytes long, the limit is"
                f" {min(_MAX_HEADER_BYTES, size - 8)} (file of {size} bytes): truncated or not safetensors"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=lambda pairs: _no_duplicates(pairs, path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(
            f"{path}: the header must be a JSON object, got {type(header).__name__}"
        )
    header.pop("__metadata__", None)
    start = 8 + length
    entries = {name: _entry(path, name, row, start) for name, row in header.items()}
    _check_coverage(path, entries, start, size)
    return entries


def _no_duplicates(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise CheckpointError(f"{path}: {key!r} stands twice in the header")
        found[key] = value
    return found


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(path: Path, name: str, row: object, start: int) -> _Entry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(row, dict):
        raise CheckpointError(f"{where}: expected an object in the header, found {shown(row)}")
    dtype, shape, offsets = row.get("dtype"), row.get("shape"), row.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(f"{where}: unknown dtype {shown(dtype)}")
    if not (isinstance(shape, list) and all(_is_size(n) for n in shape)):
        raise CheckpointError(f"{where}: shape must be a list of sizes, found {shown(shape)}")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(_is_size(n) for n in offsets)):
        raise CheckpointError(f"{where}: data_offsets must be [begin, end], found {shown(offsets)}")
    num_elements = 1
    for n in shape:  # Python ints: a product that overflows 64 bits cannot wrap to a small one
        num_elements *= n
    expected = -(-num_elements * _BITS[dtype] // 8)
    if offsets[1] - offsets[0] != expected:
        raise CheckpointError(
            f"{where}: {dtype}{shape} is {expected} bytes,"
            f" data_offsets {offsets} hold {offsets[1] - offsets[0]}"
        )
    return _Entry(dtype=dtype, shape=tuple(shape), begin=start + offsets[0], end=start + offsets[1])


def _check_coverage(path: Path, entries: Mapping[str, _Entry], start: int, size: int) -> None:
    position = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise CheckpointError(
                f"{path}: tensor {name!r} begins at byte {entry.begin}, expected {position}"
                " (tensors must lie back to back)"
            )
        if entry.end > size:
            raise CheckpointError(
                f"{path}: tensor {name!r} ends at byte {entry.end}, the file has {size}: truncated"
            )
        position = entry.end
    if position != size:
        raise CheckpointError(f"{path}: the tensors end at byte {position}, the file has {size}")


class SafetensorsSource:
    """The tensors of a set of shards; a `TensorSource`."""

    readable_dtypes = ", ".join(_READABLE)

    def __init__(self, files: Iterable[Path]):
        self._entries: dict[str, tuple[Path, _Entry]] = {}
        for path in files:
            for name, entry in read_header(path).items():
                if name in self._entries:
                    raise CheckpointError(
                        f"tensor {name!r} is stored twice: in {self._entries[name][0]} and in {path}"
                    )
                self._entries[name] = (path, entry)
        self._infos = {
            name: TensorInfo(
                name=name,
                file=path,
                dtype=entry.dtype,
                shape=entry.shape,
                readable=entry.dtype in _READABLE,
            )
            for name, (path, entry) in self._entries.items()
        }

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every stored tensor by name."""
        return self._infos

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows as a read-only view of the mapped file, in the stored dtype (f32, f16 or bf16)."""
        path, entry = self._entries[name]
        if entry.dtype not in _READABLE:
            raise CheckpointError(
                f"{path}: tensor {name!r}: dtype must be one of {self.readable_dtypes}, found {entry.dtype}"
            )
        dtype, shape, offset = _READABLE[entry.dtype], entry.shape, entry.begin
        if shape:
            begin, end, _ = slice(begin, end).indices(shape[0])
            row_bytes = dtype.itemsize * math.prod(shape[1:])
            shape, offset = (max(0, end - begin), *shape[1:]), entry.begin + begin * row_bytes
        length = dtype.itemsize * math.prod(shape)
        if length == 0:
            return np.zeros(shape, dtype)
        raw = np.memmap(path, np.uint8, mode="r", offset=offset, shape=(length,))
        return np.asarray(raw).view(dtype).reshape(shape)


def find_shards(directory: Path) -> SafetensorsSource:
    """Opens the weights of a Hugging Face directory: by its index, else every *.safetensors file in it.

    Raises:
        CheckpointError: a shard is missing, a tensor is not where the index says, or a file is damaged.
    """
    index_path = directory / INDEX_NAME
    if index_path.is_file():
        return _open_indexed(directory, index_path)
    files = sorted(directory.glob("*.safetensors"))
    for path in files:
        match = _SHARD_NAME.fullmatch(path.name)
        if match is None:
            continue
        stem, _, total = match.groups()
        for number in range(1, int(total) + 1):
            shard = directory / f"{stem}{number:05d}-of-{total}.safetensors"
            if not shard.is_file():
                raise CheckpointError(
                    f"{shard}: shard is missing ({path.name} says there are {int(total)})"
                )
    return SafetensorsSource(files)


def _open_indexed(directory: Path, index_path: Path) -> SafetensorsSource:
    try:
        index = json.loads(index_path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index_path}: not JSON ({error})") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(
            f"{index_path}: weight_map must map tensor names to file names, got {shown(weight_map)}"
        )
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(
                f"{index_path}: weight_map[{tensor!r}] must be a file name, got {shown(file)}"
            )
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index_path}: shard must be a *.safetensors file beside it, got {name!r}"
            )
        if not (directory / name).is_file():
            raise CheckpointError(
                f"{directory / name}: shard is missing, though {index_path.name} lists it"
            )
    source = SafetensorsSource(directory / name for name in names)
    for tensor, file in weight_map.items():
        info = source.infos.get(tensor)
        if info is None:
            raise CheckpointError(
                f"{directory / file}: tensor {tensor!r} is missing, though the index lists it"
            )
        if info.file.name != file:
            raise CheckpointError(f"{info.file}: tensor {tensor!r} is here, the index says {file}")
    for tensor, info in source.infos.items():
        if tensor not in weight_map:
            raise CheckpointError(f"{info.file}: tensor {tensor!r} is not in {index_path.name}")
    return source
