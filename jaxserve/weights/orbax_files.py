"""Where an Orbax checkpoint lies in a directory. Called by `loader`; needs none of Orbax's libraries.

DIR, DIR/params, DIR/default, ...                     one tree
DIR/1000, DIR/1000/params, ...                        the newest step of a `CheckpointManager`
"""

import re
from pathlib import Path

from jaxserve.errors import CheckpointError

METADATA = "_METADATA"  # beside the arrays of a tree
PARAMS = "params"  # where `convert` puts the tree
KV_SCALES = "kv_scales.safetensors"  # beside it: what belongs to no params tree
_ITEMS = ("", PARAMS, "default", "model", "pytree", "state")  # names that savers use, in this order
_STEP = re.compile(r"(?:.*[_-])?(\d+)")
_UNFINISHED = ".orbax-checkpoint-tmp"
_MAX_PARENTS = 3


def orbax_item(directory: Path) -> Path | None:
    """The folder of the params tree, if the directory holds an Orbax checkpoint.

    Raises:
        CheckpointError: one that was not written to its end.
    """
    if any(_UNFINISHED in part for part in directory.resolve().parts):
        raise CheckpointError(f"{directory}: an Orbax checkpoint that was not written to its end")
    found = _item_in(directory)
    if found is not None:
        return found
    steps = []
    for path in directory.iterdir():
        match = _STEP.fullmatch(path.name)
        if match and _UNFINISHED not in path.name and path.is_dir() and (item := _item_in(path)):
            steps.append((int(match[1]), item))
    return max(steps)[1] if steps else None


def _item_in(directory: Path) -> Path | None:
    return next(
        (directory / name for name in _ITEMS if (directory / name / METADATA).is_file()), None
    )


def config_directory(item: Path) -> Path:
    """The folder with the config.json of a params tree: its own, or one above.

    Raises:
        CheckpointError: there is none.
    """
    above = [item, *item.resolve().parents[:_MAX_PARENTS]]
    for folder in above:
        if (folder / "config.json").is_file():
            return folder
    raise CheckpointError(
        f"{item}: an Orbax checkpoint without a config.json: put the model's config.json (and its "
        f"tokenizer files) into this folder or one above it, as `jaxserve convert` does"
    )
