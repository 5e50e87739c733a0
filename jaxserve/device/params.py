"""Params on their way to the devices: checked against what the model expects, leaf by leaf.

Called by `build` for the first weights and by the executor for those that replace them. Invariant:
what is returned is plain dicts of the expected keys, shapes and dtypes, packed where the caller asked for
it, cut where devices share it, and complete on the devices.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxserve.device.placement import Placement
from jaxserve.errors import ConfigError
from jaxserve.model.packed import LayerLayout, pack_params
from jaxserve.model.registry import ModelFunctions, Params
from jaxserve.model.sharding import fit_param, param_specs

Place = Callable[[Sequence[str | int], Any], jax.Array]


def put_params(
    params: object,
    abstract: Params,
    *,
    own: bool = False,
    pack: LayerLayout | None = None,
    consume: bool = False,
    place: Place | None = None,
) -> Params:
    """The tree as plain dicts, every leaf on the devices.

    Args:
        params: nested mappings of arrays, numpy or already on devices; what is where it is served is
            shared, not copied.
        abstract: `ModelFunctions.given_params`.
        own: numpy arrays may be written to afterwards. Else they are not, and where the device is
            the CPU they are used in place: a mapped checkpoint is not copied.
        pack: pack layers so, and the head (`model.packed`). What is packed is a copy, so for arrays that
            are on the device already the caller's come on top. None = as they are.
        consume: `params` is a dict that nobody else needs, and is empty afterwards: each matrix is
            dropped once it is packed.
        place: puts one param on its devices; None = the default one.

    Raises:
        ConfigError: a leaf that is missing, superfluous, of another shape or dtype, or without values; it
            is named.
    """
    checked = checked_params(params, abstract)
    _check_contents(checked)
    callers = {id(leaf) for leaf in jax.tree.leaves(checked)} if own else set()
    if consume and isinstance(params, dict):
        params.clear()
    if pack is not None:
        checked = pack_params(checked, pack, consume=True)  # from a tree of our own
    if own and jax.default_backend() == "cpu":  # not what was made here
        checked = jax.tree.map(lambda leaf: _copied(leaf) if id(leaf) in callers else leaf, checked)
    if place is None:
        return jax.block_until_ready(jax.device_put(checked))
    put = jax.tree_util.tree_map_with_path(
        lambda path, leaf: place([key.key for key in path], leaf), checked
    )
    return jax.block_until_ready(put)


def checked_params(params: object, abstract: Params) -> Params:
    """The tree as plain dicts, its leaves untouched. Arguments and errors as of `put_params`."""
    return _checked(params, abstract, "params")


class ParamPlacer:
    """Puts the params of a model where it is served, one at a time: a `Place`.

    Args:
        model: the model.
        placement: the devices.
    """

    def __init__(self, model: ModelFunctions, placement: Placement):
        self._placement = placement
        self._head_dim = model.config.head_dim
        self._given = model.given_params
        self._abstract, self._specs = None, None
        if not model.packs:  # what is packed is whole, on one device
            self._abstract = model.abstract_params
            self._specs = param_specs(model.abstract_params, placement.rules)

    def __call__(self, path: Sequence[str | int], array: Any) -> jax.Array:
        """One param on the devices; its transfer may still be under way.

        Args:
            path: keys of the params tree, such as ("layers", 0, "attn", "k", "kernel").
            array: numpy or on devices, in the checkpoint's shape. numpy is used in place where the
                device is a CPU and nothing has to change.
        """
        array = self._at_home(array)
        if self._abstract is None:
            return self._placement.put(array)
        shape = _at(self._abstract, path).shape
        fitting = fit_param(array, str(path[-2]), shape, self._head_dim)
        return self._placement.put(fitting, _at(self._specs, path))

    def _at_home(self, array: Any) -> Any:
        """Without a mesh nothing binds a param to the default device, but its owner may have bound it to
        others.
        """
        if self._placement.mesh is not None or not isinstance(array, jax.Array):
            return array
        default = jax.device_put(np.int32(0)).sharding
        is_there = array.sharding.device_set == default.device_set
        return array if is_there else jax.device_put(array, default)

    def sharding_of(self, path: Sequence[str | int]) -> Sharding | None:
        """How one param lies on several devices, if it is served in the checkpoint's shape: each part
        may then be read on its own. None for others, and where there is one device.
        """
        if self._abstract is None or not self._placement.is_shared:
            return None
        if _at(self._given, path).shape != _at(self._abstract, path).shape:
            return None
        return self._placement.sharding(_at(self._specs, path))


def _at(tree: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def find_deleted(params: Params) -> str | None:
    """The name of a param that is no more: whoever shares it has donated or deleted it."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            return f"params{jax.tree_util.keystr(path)}"
    return None


def _check_contents(params: Params) -> None:
    """Raises ConfigError if a param is a shape and a dtype only."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            name = f"params{jax.tree_util.keystr(path)}"
            raise ConfigError(f"{name}: expected an array, found a ShapeDtypeStruct")
    deleted = find_deleted(params)
    if deleted is not None:
        raise ConfigError(f"{deleted}: expected an array, found one that was donated or deleted")


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


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
