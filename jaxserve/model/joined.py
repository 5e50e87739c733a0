"""Weights that multiply the same rows, joined: q, k, v as one matrix, gate and up as another.

Made by `device.params` where `ModelFunctions.joins` says that it pays: one product of few rows then reads
memory in one long run, where three short ones end and begin. Nothing else changes: a sum for a column
is what it was. Invariant: a layer is joined as a whole or not at all, and `is_joined` tells which.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# (module, the name of what is joined, its parts in the order of their columns)
JOINED = (("attn", "qkv", ("q", "k", "v")), ("mlp", "gate_up", ("gate", "up")))


def is_joined(layer: Mapping[str, Any]) -> bool:
    """Whether a layer's params come from `join_layer`."""
    return "qkv" in layer["attn"]


def join_layer(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's params with the projections of `JOINED` side by side; all else is shared.

    Args:
        layer: {"attn": {q, k, v, o}, "mlp": {gate, up, down}, ...} of numpy arrays, arrays on a
            device, or abstract arrays.

    Returns:
        {"attn": {qkv, o}, "mlp": {gate_up, down}, ...} of the same.
    """
    joined = dict(layer)
    for module, name, parts in JOINED:
        rest = {key: value for key, value in layer[module].items() if key not in parts}
        trees = [layer[module][part] for part in parts]
        joined[module] = rest | {name: jax.tree.map(lambda *leaves: _side_by_side(leaves), *trees)}
    return joined


def _side_by_side(leaves: tuple[Any, ...]) -> Any:
    first = leaves[0]
    shape = (*first.shape[:-1], sum(leaf.shape[-1] for leaf in leaves))
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, first.dtype)
    if not all(isinstance(leaf, np.ndarray) for leaf in leaves):
        return jnp.concatenate([jnp.asarray(leaf) for leaf in leaves], axis=-1)
    whole = np.empty(shape, first.dtype)  # in C order, whatever the parts are in
    np.concatenate(leaves, axis=-1, out=whole)
    return whole
