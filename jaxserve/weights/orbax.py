"""An Orbax checkpoint as the weights of a model: found, checked, read by parts.

`loader.open_checkpoint` asks `orbax_item` whether a directory is one and opens it here. What Orbax wrote
is read as it lies, with tensorstore, which Orbax itself reads with: any rows of any array, and on a mesh
each device's part alone, straight from the files.

    DIR/config.json, tokenizer files        as in a Hugging Face directory
    DIR/params/_METADATA, ...               the params tree (`model.llama`); see `_ITEMS` for other places

Invariant: an array is read whole or an error says what is missing; nothing is taken for zeros that was
never written.

Source: the format that orbax-checkpoint documents, "Checkpoint Format Guide" (metadata in JSON, arrays in
Zarr 2 or 3, in files of their own or in one OCDBT store).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from jaxserve.errors import CheckpointError, shown
from jaxserve.weights.checkpoint import TensorInfo
from jaxserve.weights.name_maps import param_name
from jaxserve.weights.orbax_files import METADATA
from jaxserve.weights.param_stream import aligned_empty
from jaxserve.weights.safetensors import SafetensorsSource

_READABLE = ("float32", "bfloat16", "float16")
# What a training state may have around the params, and flax around each array.
_WRAPPER, _VALUE = "params", "value"
_MANIFEST = "manifest.ocdbt"
_ARRAYS = ("jax.Array", "np.ndarray")


class OrbaxSource:
    """The arrays of one Orbax checkpoint by their names in the params tree; a `ParamSource`.

    Args:
        item: the folder that holds `_METADATA`.
        scales: tensors beside it that belong to no params tree (scales of a KV cache).

    Raises:
        CheckpointError: damaged, or no tree of arrays.
    """

    readable_dtypes = ", ".join(_READABLE)

    def __init__(self, item: Path, scales: SafetensorsSource | None = None):
        self._item = item
        self._scales = scales
        self._arrays = _open_arrays(item)
        self._infos = {
            name: TensorInfo(
                name=name,
                file=item,
                dtype=array.dtype.name,
                shape=tuple(array.shape),
                readable=array.dtype.name in _READABLE,
                block_rows=_chunk_rows(array),
            )
            for name, array in self._arrays.items()
        }
        if scales is not None:
            self._infos |= scales.infos

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every array by its path in the params tree."""
        return self._infos

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows of an array, or of a scale, in the stored dtype."""
        if name not in self._arrays and self._scales is not None:
            return self._scales.read(name, begin, end)
        array = self._arrays[name]
        begin, end, _ = slice(begin, end).indices(array.shape[0]) if array.shape else (0, 0, 1)
        return self._wait(name, (array[begin:end] if array.shape else array).read())

    def read_into(self, name: str, begin: int, end: int, out: np.ndarray) -> None:
        """Rows [begin, end) straight into an array of any floating dtype."""
        self._copy(name, self._arrays[name][begin:end], out)

    def read_onto(self, name: str, sharding: Any, dtype: Any) -> Any:
        """A jax array; each part that devices here hold is read once, and no other."""
        import jax  # not where headers alone are looked at

        array, dtype = self._arrays[name], np.dtype(dtype)
        parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            slices = index or (slice(None),) * len(array.shape)
            ranges = [one.indices(size) for one, size in zip(slices, array.shape, strict=True)]
            key = tuple((begin, end) for begin, end, _ in ranges)
            if key not in parts:
                out = aligned_empty(tuple(end - begin for begin, end in key), dtype)
                self._copy(name, array[tuple(slice(*pair) for pair in key)], out)
                parts[key] = out
            return parts[key]

        return jax.make_array_from_callback(tuple(array.shape), sharding, part)

    def _copy(self, name: str, stored: ts.TensorStore, out: np.ndarray) -> None:
        if out.size == 0:
            return
        if stored.dtype.name != out.dtype.name:
            stored = ts.cast(stored, ts.dtype(out.dtype))
        self._wait(name, ts.array(out).write(stored[ts.d[:].translate_to[0]]))

    def _wait(self, name: str, future: Any) -> Any:
        try:
            return future.result()
        except ValueError as error:
            raise CheckpointError(f"{self._item}: array {name!r} cannot be read: {error}") from None


def _chunk_rows(array: ts.TensorStore) -> int:
    """How many rows are stored together: none of them can be had without the others."""
    if not array.shape:
        return 1
    rows = (array.chunk_layout.read_chunk.shape or (None,))[0]
    return min(rows or array.shape[0], max(1, array.shape[0]))


def _open_arrays(item: Path) -> dict[str, ts.TensorStore]:
    metadata = _read_metadata(item)
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    opening = {
        name: ts.open(_spec(item, keys, metadata), open=True, read=True, context=context)
        for name, keys in _names(_array_paths(item, metadata)).items()
    }
    arrays = {}
    for name, future in opening.items():
        try:
            arrays[name] = future.result()
        except ValueError as error:
            raise CheckpointError(f"{item}: array {name!r} cannot be opened: {error}") from None
    return arrays


def _read_metadata(item: Path) -> dict[str, Any]:
    path = item / METADATA
    try:
        metadata = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("tree_metadata"), dict):
        raise CheckpointError(
            f"{path}: has no object tree_metadata: not the tree of an Orbax checkpoint"
        )
    return metadata


def _array_paths(item: Path, metadata: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The keys to every array of the tree; empty nodes have none."""
    paths = []
    for entry in metadata["tree_metadata"].values():
        try:
            keys = tuple(str(key["key"]) for key in entry["key_metadata"])
            value = entry["value_metadata"]
            kind, skipped = value["value_type"], value.get("skip_deserialize", False)
        except (KeyError, TypeError):
            raise CheckpointError(
                f"{item / METADATA}: tree_metadata: no entry of an Orbax checkpoint: {shown(entry)}"
            ) from None
        if not skipped and kind in _ARRAYS:
            paths.append(keys)
    return paths


def _names(paths: list[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The name in the params tree -> all keys; what surrounds the tree is taken off, and what stands
    beside it (the state of an optimiser, a step) is no part of the model."""
    inner = {keys: keys for keys in paths}
    while not any(keys[:1] == ("embed",) for keys in inner) and any(
        keys[:1] == (_WRAPPER,) for keys in inner
    ):
        inner = {keys[1:]: whole for keys, whole in inner.items() if keys[:1] == (_WRAPPER,)}
    if inner and all(keys[-1:] == (_VALUE,) for keys in inner):
        inner = {keys[:-1]: whole for keys, whole in inner.items()}
    return {param_name(keys): whole for keys, whole in inner.items()}


def _is_one_store(item: Path, metadata: Mapping[str, Any]) -> bool:
    has_manifest = (item / _MANIFEST).is_file()
    if metadata.get("use_ocdbt") and not has_manifest:
        raise CheckpointError(
            f"{item}: has no {_MANIFEST}: the checkpoint was not written to its end"
        )
    return has_manifest


def _spec(item: Path, keys: tuple[str, ...], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What tensorstore needs to open an array."""
    name = ".".join(keys)
    folder = f"{item.resolve()}/"
    store: dict[str, Any] = {"driver": "file", "path": f"{folder}{name}/"}
    if _is_one_store(item, metadata):
        store = {"driver": "ocdbt", "base": {"driver": "file", "path": folder}, "path": f"{name}/"}
    return {
        "driver": "zarr3" if metadata.get("use_zarr3") else "zarr",
        "kvstore": store,
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        # Zeros are written where the metadata says so; else a chunk of zeros may be left out.
        "fill_missing_data_reads": not metadata.get("store_array_data_equal_to_fill_value"),
    }
