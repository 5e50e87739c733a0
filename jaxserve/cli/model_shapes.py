"""A model by name for commands that need its shapes alone: `simulate` and `plan`.

Reads a config.json or the head of a GGUF file at the most; imports no jax and reads no weights.
"""

import json
from pathlib import Path

from jaxserve.cli.arguments import UsageError
from jaxserve.hf_config.read import read_hf_config
from jaxserve.model_config import ModelConfig
from jaxserve.plan.model_table import CONFIGS
from jaxserve.plan.models import ModelSpec
from jaxserve.weights.gguf import open_gguf
from jaxserve.weights.manifest import (
    checkpoint_folders,
    closest_name,
    fetched_names,
    is_hub_id,
    is_name,
)

MODEL_HELP = (
    f"{', '.join(CONFIGS)}, a folder with a config.json (the weights need not be there), that file, a "
    ".gguf file, or a fetched name."
)


def find_model(name: str) -> ModelSpec:
    """A model by the name in the table, by its config.json, by the folder of that, or by a fetched name.

    Raises:
        UsageError: nothing is there, or the file cannot be read.
        CheckpointError: a config.json that says nothing the engine serves.
    """
    return ModelSpec.from_config(find_config(name))


def find_config(name: str) -> ModelConfig:
    """The config of such a model; as `find_model`."""
    if name in CONFIGS:
        return CONFIGS[name]
    if name.endswith(".gguf") and Path(name).is_file():
        return open_gguf(Path(name)).config
    folders = [Path(), *(checkpoint_folders() if is_name(name) or is_hub_id(name) else ())]
    paths = [folder / name / "config.json" for folder in folders]
    if name.endswith(".json"):
        paths.insert(0, Path(name))
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        close = closest_name(name, [*CONFIGS, *fetched_names()])
        raise UsageError(
            f"--model={name}: neither a folder with a config.json, nor fetched, nor one of "
            f"{', '.join(CONFIGS)}" + (f"; did you mean {close}?" if close else "")
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--model={name}: cannot read {path}: {error}") from None
    return read_hf_config(values, None, str(path))
