"""Parameters as an Orbax checkpoint, written by Orbax itself, one array in memory at a time.

Called by `convert`. Orbax takes a tree of arrays that are all there; here its leaves are read when their
turn has come. Invariant: what is written is an ordinary checkpoint of numpy arrays, in pieces small enough
that each device of a mesh can read its own part.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from jaxserve.errors import CheckpointError
from jaxserve.weights.save import UnreadParam

_CHUNK_BYTES = 8 << 20


class _OneByOne(type_handlers.NumpyHandler):
    """Writes arrays that are read first, each gone before the next."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._under_way: Sequence[Any] = ()

    async def serialize(
        self,
        values: Sequence[Any],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.SaveArgs] | None = None,
    ) -> list[Any]:
        given = args or [type_handlers.SaveArgs()] * len(values)
        for value, info, arg in zip(values, infos, given, strict=True):
            array = await asyncio.to_thread(value.read)
            self._under_way = await super().serialize([array], [info], [arg])
            for future in self._under_way:
                await asyncio.to_thread(future.result)
            del array
        return []

    def settle(self) -> None:
        """Waits for the thread that writes an array: whoever was interrupted may then remove the folder."""
        for future in self._under_way:
            with contextlib.suppress(Exception):
                future.result()


def save_params(folder: Path, params: Iterable[UnreadParam]) -> None:
    """Writes the params tree.

    Args:
        folder: where the checkpoint goes; made here, whole or not at all.
        params: from `save.unread_params`.

    Raises:
        CheckpointError: a parameter cannot be read, or the checkpoint not be written.
    """
    tree: dict[str, Any] = {}
    for param in params:
        *outer, last = (str(key) for key in param.spec.path)
        node = tree
        for key in outer:
            node = node.setdefault(key, {})
        node[last] = param
    handler = _OneByOne()
    registry = type_handlers.create_type_handler_registry(
        (UnreadParam, handler),
        (jax.Array, type_handlers.ArrayHandler()),  # there is none, but Orbax warns without it
    )
    pytree_handler = ocp.PyTreeCheckpointHandler(
        type_handler_registry=registry, use_compression=False
    )
    save_args = _like(tree, type_handlers.SaveArgs(chunk_byte_size=_CHUNK_BYTES))
    try:
        with ocp.Checkpointer(pytree_handler) as checkpointer:
            checkpointer.save(folder.resolve(), args=ocp.args.PyTreeSave(tree, save_args=save_args))
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(f"{folder}: Orbax could not write it: {error}") from error
    finally:
        handler.settle()


def _like(tree: dict[str, Any], leaf: Any) -> dict[str, Any]:
    return {
        key: _like(value, leaf) if isinstance(value, dict) else leaf for key, value in tree.items()
    }
