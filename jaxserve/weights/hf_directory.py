"""The Hugging Face directory: config.json, tokenizer files and *.safetensors, read and written.

`loader.open_checkpoint` reads one; `fetch` and the tests write one. Only data formats are touched:
a directory whose weights are pickles (.bin, .pt, .pth, .pkl, ...) is refused, because reading one
runs code.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.hf_config.read import read_hf_config
from jaxserve.text.chat_template import TemplateSource
from jaxserve.text.template_files import config_templates, directory_templates, write_templates
from jaxserve.weights.checkpoint import Checkpoint, TensorSource
from jaxserve.weights.orbax_files import config_directory, orbax_item
from jaxserve.weights.safetensors import INDEX_NAME, find_shards
from jaxserve.weights.safetensors_writer import (
    MAX_SHARD_BYTES,
    UnwrittenTensor,
    unwritten,
    write_shards,
)

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_OTHER_SUFFIXES = (".h5", ".msgpack", ".npz", ".onnx", ".gguf")


def refuse_pickle(path: Path) -> None:
    """Raises CheckpointError when the file's name says that it is a pickle."""
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path}: {path.suffix} files are pickles, which run code when read;"
            " only .safetensors and .gguf are read"
        )


def is_hf_directory(path: Path) -> bool:
    """Whether the path is a directory that holds a config.json."""
    return (path / "config.json").is_file()


def open_hf_directory(directory: Path, source: TensorSource | None = None) -> Checkpoint:
    """Opens a directory: configs and headers are read and checked, weights stay on disk.

    Args:
        directory: with a config.json.
        source: the weights; None = the directory's safetensors files.

    Raises:
        CheckpointError: no config.json, no safetensors, a damaged file, or a model that is not served.
    """
    config_path = directory / "config.json"
    if not _is_there(config_path):
        raise CheckpointError(f"{directory}: not a checkpoint: it has no config.json")
    hf_config = _read_object(config_path)
    generation_config = read_generation_config(directory)
    config = read_hf_config(hf_config, generation_config, str(config_path))
    if source is None:
        _check_has_safetensors(directory)
        source = find_shards(directory)
    tokenizer_path = directory / "tokenizer_config.json"
    tokenizer_config = _read_object(tokenizer_path) if _is_there(tokenizer_path) else {}
    return Checkpoint(
        path=directory,
        config=config,
        source=source,
        tokenizer_json=_read_text(directory / "tokenizer.json"),
        tokenizer_config=tokenizer_config,
        generation_config=generation_config,
        chat_template=_chat_templates(directory, tokenizer_config, tokenizer_path),
        hf_config=hf_config,
    )


def read_generation_config(model: Path) -> dict[str, Any]:
    """The object of a checkpoint's generation_config.json; {} where it has none, as a GGUF file has none.

    Raises:
        CheckpointError: it is there and no JSON object.
    """
    if not model.is_dir():
        return {}
    if not is_hf_directory(model) and (item := orbax_item(model)):
        model = config_directory(item)
    path = model / "generation_config.json"
    return _read_object(path) if _is_there(path) else {}


def _check_has_safetensors(directory: Path) -> None:
    if (directory / INDEX_NAME).is_file() or any(directory.glob("*.safetensors")):
        return
    files = sorted(path for path in directory.iterdir() if path.is_file())
    for path in files:
        refuse_pickle(path)
    others = [path.name for path in files if path.suffix in _OTHER_SUFFIXES]
    found = f"; found {', '.join(others)}" if others else ""
    raise CheckpointError(f"{directory}: not a checkpoint: it has no *.safetensors file{found}")


def _is_there(path: Path) -> bool:
    """Whether a file of this name is there. What is there and no file (a folder, a link to nothing) is
    an error: to pass over it would be to serve the model otherwise than it says.
    """
    if path.is_file():
        return True
    if path.is_symlink() or path.exists():
        what = "a link to nothing" if path.is_symlink() and not path.exists() else "no file"
        raise CheckpointError(f"{path}: must be a file, and is {what}")
    return False


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


def _read_text(path: Path) -> str | None:
    if not _is_there(path):
        return None
    try:
        return _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text ({error})") from None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, found {type(value).__name__}")
    return value


def _chat_templates(
    directory: Path, tokenizer_config: Mapping[str, Any], path: Path
) -> TemplateSource:
    found = directory_templates(directory)
    if found is not None:
        return found
    try:
        return config_templates(tokenizer_config)
    except CheckpointError as error:
        raise CheckpointError(f"{path.parent}: {error}") from error


def write_json(path: Path, value: object) -> None:
    """Writes JSON the same way every time: indented by 2, UTF-8, a newline at the end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_hf_directory(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray] | Sequence[UnwrittenTensor],
    *,
    tokenizer_json: str | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    chat_template: TemplateSource = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a checkpoint that this project and transformers both read.

    Args:
        directory: made if missing.
        config: the object of config.json.
        tensors: Hugging Face names and arrays, or tensors that are read as they are written.
        tokenizer_json: text of tokenizer.json.
        tokenizer_config, generation_config: objects of the files of that name.
        chat_template: text of chat_template.jinja, or the texts of several templates by name.
        max_shard_bytes: a new shard begins when the next tensor would pass this; one shard is called
            model.safetensors, several get an index.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_shards(
        directory, unwritten(tensors) if isinstance(tensors, Mapping) else tensors, max_shard_bytes
    )
    if tokenizer_json is not None:
        (directory / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    if tokenizer_config is not None:
        write_json(directory / "tokenizer_config.json", tokenizer_config)
    if generation_config is not None:
        write_json(directory / "generation_config.json", generation_config)
    write_templates(directory, chat_template)
    write_json(directory / "config.json", config)  # last: without it nobody takes this for a model
