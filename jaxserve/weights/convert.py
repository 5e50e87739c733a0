"""From one format of a checkpoint to another: whatever `open_checkpoint` opens becomes a Hugging Face
directory or an Orbax checkpoint with the same files beside it.

Called by `cli/convert.py`. Invariant: what stands at the destination is whole and has been checked; its
config.json is written last. The model is never in memory: one tensor is, or a block of one.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.model_config import ModelConfig
from jaxserve.text.template_files import DEFAULT_FILE, NAMED_FOLDER, write_templates
from jaxserve.weights import orbax_files
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.hf_directory import write_json
from jaxserve.weights.loader import check_tensors, open_checkpoint, resolve_model
from jaxserve.weights.safetensors_writer import MAX_SHARD_BYTES, write_file, write_shards
from jaxserve.weights.save import kv_scale_tensors, unread_params, unwritten_tensors
from jaxserve.weights.whole_folder import refuse_existing, whole_folder

FORMATS = ("safetensors", "orbax")
DTYPES = ("float32", "bfloat16", "float16")
# What comes along as it is: tokenizers, whether we read them or transformers does, and what is said of a
# model.
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    DEFAULT_FILE,
    "LICENSE",
    "NOTICE",
)
_CONFIG = "config.json"

Report = Callable[[str], None]


def convert(
    source: str | Path,
    destination: Path,
    *,
    format: str,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    report: Report = lambda line: None,
) -> Path:
    """Writes a checkpoint in another format, or another dtype.

    Args:
        source: a directory, a .gguf file or a name.
        destination: a folder that is not there, or empty.
        format: one of `FORMATS`.
        dtype: of every weight, one of `DTYPES`; None = as stored, what is quantised as float32.
        max_shard_bytes: of a safetensors file, as far as one tensor fits.
        report: called with one line of text per stage.

    Returns:
        destination.

    Raises:
        CheckpointError: no model that is served, a value that the dtype cannot hold, no room, or something
            is at the destination.
    """
    if format not in FORMATS:
        raise CheckpointError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes must be 1 or more, got {max_shard_bytes}")
    refuse_existing(destination)
    checkpoint = open_checkpoint(resolve_model(source))
    config = check_tensors(checkpoint)
    written = None if dtype is None else np.dtype(dtype)
    try:
        with whole_folder(destination) as folder:
            report(f"reading {checkpoint.path}")
            _check_room(folder, checkpoint, config, written)
            if format == "orbax":
                _write_orbax(folder, checkpoint, config, written)
            else:
                tensors = unwritten_tensors(checkpoint, config, written)
                write_shards(folder, tensors, max_shard_bytes)
            _write_texts(folder, checkpoint)
            write_json(folder / _CONFIG, _hf_config(checkpoint, config, written))
            check_tensors(open_checkpoint(folder))
    except OSError as error:
        raise CheckpointError(f"cannot write {destination}: {error}") from None
    report(f"{destination} is ready")
    return destination


def _check_room(
    folder: Path, checkpoint: Checkpoint, config: ModelConfig, dtype: np.dtype | None
) -> None:
    tensors = unwritten_tensors(checkpoint, config, dtype)
    needed, free = sum(tensor.num_bytes for tensor in tensors), shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{folder.parent}: not enough room: the weights take {needed:,} bytes, "
            f"{free:,} are free"
        )


def _write_orbax(
    folder: Path, checkpoint: Checkpoint, config: ModelConfig, dtype: np.dtype | None
) -> None:
    from jaxserve.weights.orbax_save import save_params  # a library that takes seconds to import

    save_params(folder / orbax_files.PARAMS, unread_params(checkpoint, config, dtype))
    scales = kv_scale_tensors(checkpoint)
    if scales:
        write_file(folder / orbax_files.KV_SCALES, scales)


def _write_texts(folder: Path, checkpoint: Checkpoint) -> None:
    """The files beside the weights: copies, or what a GGUF file says in their place."""
    if checkpoint.path.is_dir():
        for name in _COPIED:
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, folder / name)
        if (checkpoint.path / NAMED_FOLDER).is_dir():
            shutil.copytree(checkpoint.path / NAMED_FOLDER, folder / NAMED_FOLDER)
        return
    if checkpoint.tokenizer_json is not None:
        (folder / "tokenizer.json").write_text(checkpoint.tokenizer_json, encoding="utf-8")
        write_json(folder / "tokenizer_config.json", checkpoint.tokenizer_config)
    if checkpoint.generation_config:
        write_json(folder / "generation_config.json", checkpoint.generation_config)
    write_templates(folder, checkpoint.chat_template)


def _hf_config(
    checkpoint: Checkpoint, config: ModelConfig, dtype: np.dtype | None
) -> Mapping[str, Any]:
    """config.json, true to the weights that were written."""
    written = dict(checkpoint.hf_config)
    if config.tie_word_embeddings != checkpoint.config.tie_word_embeddings:
        written["tie_word_embeddings"] = config.tie_word_embeddings
    if dtype is not None:
        keys = [key for key in ("dtype", "torch_dtype") if key in written] or ["torch_dtype"]
        written |= dict.fromkeys(keys, dtype.name)
    return written
