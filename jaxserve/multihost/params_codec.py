"""New weights on their way to the followers: a message for each array. Used by leader and followers.

Invariant: the tree that is put together has the paths, shapes, types and bytes of the one that was sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.errors import ConfigError, shown
from jaxserve.multihost.wire import DTYPES

Key = str | int


def encode_params(params: object) -> Iterator[tuple[dict[str, Any], list[np.ndarray]]]:
    """(fields, arrays) of the message for each leaf.

    Raises:
        ConfigError: a leaf that cannot be sent, by its path; before the first message.
    """
    leaves = list(_leaves(params, ()))
    for path, leaf in leaves:
        name = "params" + "".join(f"[{key!r}]" for key in path)
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise ConfigError(f"{name}: expected an array, found {shown(leaf)}")
        if not getattr(leaf, "is_fully_addressable", True):
            raise ConfigError(
                f"{name}: this process holds only a part of it; give the followers' parts as well, as "
                "numpy arrays or as arrays that lie in this process"
            )
        if not all(isinstance(key, str | int) for key in path):
            raise ConfigError(f"{name}: the keys of params are texts and integers")
        if np.dtype(leaf.dtype).name not in DTYPES:
            raise ConfigError(f"{name}: arrays of {leaf.dtype} cannot be sent to other processes")
    return (({"path": list(path)}, [np.asarray(leaf)]) for path, leaf in leaves)


def put_leaf(tree: dict[Key, Any], path: Sequence[Key], leaf: np.ndarray) -> None:
    """Puts a leaf that was sent where it belongs."""
    *folders, last = path
    for folder in folders:
        tree = tree.setdefault(folder, {})
    tree[last] = leaf


def _leaves(node: Any, path: tuple[Key, ...]) -> Iterator[tuple[tuple[Key, ...], Any]]:
    if isinstance(node, Mapping):
        for key, child in node.items():
            yield from _leaves(child, (*path, key))
    else:
        yield path, node
