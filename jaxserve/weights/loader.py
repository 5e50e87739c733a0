"""From a name to parameters: `resolve_model` -> `open_checkpoint` -> `load_params`.

Called by `load_model`, `fetch` and the tests. Everything a header can tell (missing, unknown, wrong
shape, wrong dtype) is checked before the first weight is read; then tensors stream through
(`param_stream`).

Invariant: every parameter of the model is assigned exactly once, from a tensor of the right name,
shape and kind.
"""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError, shown
from jaxserve.model_config import ModelConfig
from jaxserve.weights import name_maps
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.hf_directory import is_hf_directory, open_hf_directory, refuse_pickle
from jaxserve.weights.manifest import (
    checkpoint_folders,
    closest_name,
    fetched_names,
    is_hub_id,
    is_name,
    manifest_names,
)
from jaxserve.weights.name_maps import ParamSpec
from jaxserve.weights.orbax_files import KV_SCALES, config_directory, orbax_item
from jaxserve.weights.param_stream import ParamStream
from jaxserve.weights.safetensors import SafetensorsSource

_LOG = logging.getLogger(__name__)
_MAX_LISTED_NAMES = 20  # in an error message
_COMPARE_ROWS = (
    4096  # rows of the embedding compared at a time, so that a big head is never held twice
)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a Hugging Face directory, an Orbax checkpoint or a .gguf file; reads metadata and headers
    only.

    Raises:
        CheckpointError: none of them, damaged, or a model that is not served.
    """
    path = Path(path)
    try:
        if path.is_dir():
            item = orbax_item(path)
            return open_hf_directory(path) if item is None else _open_orbax(path, item)
        if not path.exists():
            raise CheckpointError(f"{path}: no such file or directory")
        refuse_pickle(path)
        if path.suffix == ".gguf":
            from jaxserve.weights.gguf import open_gguf  # with a library that no directory needs

            return open_gguf(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path}: give the directory that holds this file and its config.json"
        )
    raise CheckpointError(f"{path}: expected a checkpoint directory or a .gguf file")


def _open_orbax(path: Path, item: Path) -> Checkpoint:
    """The params tree in `item`, with the config and the tokenizer that lie beside it or above."""
    others = [one.name for one in path.glob("*.safetensors") if one.name != KV_SCALES]
    if others:
        raise CheckpointError(
            f"{path}: holds safetensors ({others[0]}) and an Orbax checkpoint; for the latter give {item}"
        )
    from jaxserve.weights.orbax import OrbaxSource  # with a library that no other format needs

    folder = config_directory(item)
    has_scales = (folder / KV_SCALES).is_file()
    scales = SafetensorsSource([folder / KV_SCALES]) if has_scales else None
    return open_hf_directory(folder, OrbaxSource(item, scales))


def resolve_model(name_or_path: str | Path) -> Path:
    """Turns what a user typed into a path: a directory, a .gguf file, or a NAME that was fetched.

    A NAME (or org/name) is looked up in `manifest.checkpoint_folders()`: ./checkpoints, the source
    checkout, the user's cache. A path that holds a checkpoint wins over a NAME.

    Raises:
        CheckpointError: nothing found; says where it was looked for, which names are known, which
            one may have been meant, and how to fetch it.
    """
    if not isinstance(name_or_path, str | Path):
        raise CheckpointError(
            f"model must be a directory, a .gguf file or a name, got {shown(name_or_path)}"
        )
    text = str(name_or_path)
    path = Path(name_or_path).expanduser()
    if not text:
        raise CheckpointError("model must be a directory, a .gguf file or a name, got ''")
    if path.is_file() or is_hf_directory(path):
        return path
    # "checkpoints/x" is a path like any other, not the model x of an organisation called checkpoints.
    in_checkpoints = path.parts[0] == checkpoint_folders()[0].name if path.parts else False
    if is_name(text) or (is_hub_id(text) and not in_checkpoints):
        for folder in checkpoint_folders():
            if is_hf_directory(folder / text):
                return folder / text
    if path.exists():
        return path  # a directory that is no checkpoint: open_checkpoint says what it lacks
    is_path = in_checkpoints or path.suffix == ".gguf" or ("/" in text and path.parent.is_dir())
    if is_path or not (is_name(text) or is_hub_id(text)):
        raise CheckpointError(_no_such_path(text, path))
    raise CheckpointError(_no_such_name(text))


def _no_such_path(text: str, path: Path) -> str:
    """What to say of a path that is not there: what was meant among its neighbours, or how to fetch it."""
    message = f"model {text!r} not found: no such file or directory"
    folder = path.parent
    siblings = [child.name for child in folder.glob("*") if is_hf_directory(child)]
    close = closest_name(path.name, siblings)
    is_looked_in = any(folder.resolve() == one.resolve() for one in checkpoint_folders())
    if is_looked_in and path.name in manifest_names():
        message += f"; run: jaxserve fetch {path.name}"
    elif close:
        message += f"; did you mean {str(folder / close)!r}?"
    return f"{message}; {_known_names()}"


def _no_such_name(text: str) -> str:
    """As `_no_such_path`, for a NAME or org/name."""
    folders = ", ".join(str(folder) for folder in checkpoint_folders())
    message = f"model {text!r} not found: no such path, and no checkpoint of that name in {folders}"
    manifests, fetched = manifest_names(), fetched_names()
    close = closest_name(text, {*manifests, *fetched})
    if text in manifests:
        message += f"; run: jaxserve fetch {text}"
    elif close:
        how = "" if close in fetched else f" (run: jaxserve fetch {close})"
        message += f"; did you mean {close!r}?{how}"
    if is_hub_id(text):
        message += f"; from the Hugging Face hub: jaxserve fetch {text}"
    return f"{message}; {_known_names()}"


def _known_names() -> str:
    names = sorted({*manifest_names(), *fetched_names()})
    more = ", ..." if len(names) > _MAX_LISTED_NAMES else ""
    return f"known names: {', '.join(names[:_MAX_LISTED_NAMES]) or 'none'}{more}"


def load_params(
    checkpoint: Checkpoint, dtype: Any, abstract: Mapping[Any, Any] | None = None
) -> tuple[dict[str, Any], ModelConfig]:
    """Reads every parameter into host memory, several at once, straight into what is returned.

    A head: with tie_word_embeddings true and no stored lm_head.weight, or one equal to the
        embedding, the head is
    the embedding. If the stored head differs it is kept, with a warning, as transformers does. With
    tie_word_embeddings false it must be there.

    Args:
        checkpoint: from `open_checkpoint`.
        dtype: floating dtype of the result (float32, bfloat16, float16), anything numpy takes as a dtype.
        abstract: optional tree of objects with a `.shape`; the result must match it leaf by leaf.

    Returns:
        The nested dict of numpy arrays that `model/` takes (kernels are [in, out], layer keys are
        ints; each begins where the CPU device can use it in place), and the config with the head
        that was really loaded.

    Raises:
        CheckpointError: a tensor is missing, unknown, of the wrong shape or of an unreadable dtype.
    """
    config = check_tensors(checkpoint)
    if abstract is not None:
        _check_tree(abstract, name_maps.param_specs(config))
    return ParamStream(checkpoint, config, dtype).take(), config


def check_tensors(checkpoint: Checkpoint) -> ModelConfig:
    """Checks a checkpoint's tensors against its config, by the headers; reads weights only to
    compare a tied head.

    Returns:
        The config with the head that `load_params` will load.

    Raises:
        CheckpointError: a tensor is missing, unknown, of the wrong shape or of an unreadable dtype.
    """
    config = _effective_config(checkpoint)
    specs = checkpoint.param_specs(config)
    for spec in specs:
        _check_one(checkpoint, spec)
    known = {spec.name for spec in specs}
    if config.tie_word_embeddings:
        known.add(_head_and_embedding(checkpoint)[0].name)
    for name, info in checkpoint.source.infos.items():
        scaled = name_maps.kv_scale_parts(name)  # read by `kv_scales.load_kv_scales`, or by nobody
        if scaled is not None and scaled[0] < config.num_layers:
            continue
        if name not in known and not name_maps.is_ignored(name):
            raise CheckpointError(
                f"{info.file}: tensor {name!r} ({info.dtype}{list(info.shape)}) belongs to no parameter of a"
                f" {checkpoint.config.architecture} model with this config"
            )
    return config


def _effective_config(checkpoint: Checkpoint) -> ModelConfig:
    """The checkpoint's config, but untied where the file holds a head of its own that differs."""
    config = checkpoint.config
    pair = _head_and_embedding(checkpoint)
    if not config.tie_word_embeddings or pair[0].name not in checkpoint.source.infos:
        return config
    for spec in pair:
        _check_one(checkpoint, spec)
    if _is_equal(checkpoint, *pair):
        return config
    _LOG.warning(
        "%s: tie_word_embeddings is true, but the stored %s differs from %s; the stored head is used",
        checkpoint.path,
        *(spec.name for spec in pair),
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def _head_and_embedding(checkpoint: Checkpoint) -> list[ParamSpec]:
    """The head of an untied model, and the embedding."""
    untied = dataclasses.replace(checkpoint.config, tie_word_embeddings=False)
    specs = {spec.path: spec for spec in checkpoint.param_specs(untied)}
    return [specs[name_maps.HEAD_PATH], specs[name_maps.EMBEDDING_PATH]]


def _is_equal(checkpoint: Checkpoint, head: ParamSpec, embedding: ParamSpec) -> bool:
    read = checkpoint.source.read
    if checkpoint.holds_params:  # the head lies there as it multiplies, [E, V]
        return np.array_equal(read(head.name).T, read(embedding.name))
    return all(
        np.array_equal(
            read(head.name, row, row + _COMPARE_ROWS),
            read(embedding.name, row, row + _COMPARE_ROWS),
        )
        for row in range(0, head.shape[0], _COMPARE_ROWS)
    )


def _check_one(checkpoint: Checkpoint, spec: ParamSpec) -> None:
    info = checkpoint.source.infos.get(spec.name)
    if info is None:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {spec.name!r} is missing, expected shape {list(spec.stored_shape)}"
        )
    if info.shape != spec.stored_shape:
        raise CheckpointError(
            f"{info.file}: tensor {spec.name!r}: expected shape {list(spec.stored_shape)},"
            f" found {list(info.shape)}"
        )
    if not info.readable:
        raise CheckpointError(
            f"{info.file}: tensor {spec.name!r}: expected dtype {checkpoint.source.readable_dtypes},"
            f" found {info.dtype}"
        )


def _check_tree(abstract: Mapping[Any, Any], specs: list[ParamSpec]) -> None:
    expected = {spec.path: spec.tree_shape for spec in specs}
    found: dict[tuple[Any, ...], tuple[int, ...]] = {}
    stack: list[tuple[tuple[Any, ...], Any]] = [((), abstract)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, Mapping):
            stack += [((*path, key), child) for key, child in node.items()]
        else:
            found[path] = tuple(node.shape)
    for path in expected.keys() | found.keys():
        if expected.get(path) != found.get(path):
            name = "/".join(str(key) for key in path)
            raise CheckpointError(
                f"parameter {name}: the model expects {found.get(path)},"
                f" the checkpoint gives {expected.get(path)}"
            )
