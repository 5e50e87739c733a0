"""Params on their way to the device: checked against what the model expects, leaf by leaf.

Called by `build` for the first weights and by the executor for those that replace them. Invariant:
what is returned is plain dicts of the expected keys, shapes and dtypes, packed where the caller asked
for it, and complete on the device.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.model.packed import pack_params
from jaxserve.model.registry import Params


def put_param(path: tuple[str | int, ...], array: np.ndarray) -> jax.Array:
    """One parameter on the default device, complete: its host memory is free again. What places a
    `weights.param_stream.ParamStream` where the device has memory of its own.
    """
    return jax.block_until_ready(jax.device_put(array))


def put_params(
    params: object,
    abstract: Params,
    *,
    own: bool = False,
    pack: bool = False,
    consume: bool = False,
) -> Params:
    """The tree as plain dicts, every leaf on the device.

    Args:
        params: nested mappings of arrays, numpy or already on the device; the latter are shared, not
            copied.
        abstract: `ModelFunctions.abstract_params`.
        own: numpy arrays may be written to afterwards. Else they are not, and where the device is
            the CPU they are used in place: a mapped checkpoint is not copied.
        pack: pack the matrices (`model.packed`). What is packed is a copy, so for arrays that are on
            the device already the caller's come on top.
        consume: `params` is a dict that nobody else needs, and is empty afterwards: each matrix is
            dropped once it is packed.

    Raises:
        ConfigError: a leaf that is missing, superfluous, or of another shape or dtype; it is named.
    """
    checked = _checked(params, abstract, "params")
    if consume and isinstance(params, dict):
        params.clear()
    if pack:
        checked = pack_params(checked, consume=True)  # from a tree of our own
    return _put(checked, own)


def _put(tree: Params, own: bool) -> Params:
    if own and jax.default_backend() == "cpu":
        tree = jax.tree.map(
            lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree
        )
    return jax.block_until_ready(jax.device_put(tree))


def _checked(found: Any, expected: Any, name: str) -> Any:
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping):
            raise ConfigError(f"{name}: expected a dict, found {_describe(found)}")
        for key in found.keys() - expected.keys():
            raise ConfigError(f"{name}[{key!r}]: expected nothing, found {_describe(found[key])}")
        return {
            key: _checked(found.get(key), expected[key], f"{name}[{key!r}]") for key in expected
        }
    is_array = hasattr(found, "shape") and hasattr(found, "dtype")
    if not is_array or found.shape != expected.shape or found.dtype != expected.dtype:
        raise ConfigError(f"{name}: expected {_describe(expected)}, found {_describe(found)}")
    return found


def _describe(leaf: Any) -> str:
    if leaf is None:
        return "nothing"
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return f"a {type(leaf).__name__}"
