"""Weights as the C++ product takes them: q, k, v as one matrix, gate and up as another, and every matrix
in panels that lie in memory as they are read (`pallas_kernels.dense`).

Made by `device.params` where `ModelFunctions.packs` says that it pays. Nothing else changes: a column of
what is joined is what it was. Invariant: a layer, or a head, is packed as a whole or not at all, and
`is_packed` tells which.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dense.cpu import pack, pack_gated
from pallas_kernels.native.huge_pages import Arena

# (module, the name of what is packed, its parts in the order of their columns)
PACKED = (
    ("attn", "qkv", ("q", "k", "v")),
    ("attn", "o", ("o",)),
    ("mlp", "gate_up", ("gate", "up")),
    ("mlp", "down", ("down",)),
)
_PARTS = frozenset(part for _, _, parts in PACKED for part in parts)


def is_packed(tree: Mapping[str, Any]) -> bool:
    """Whether the params of a layer come from `pack_layer`, or those of a head from `pack_linear`."""
    return "packed" in (tree["attn"]["o"] if "attn" in tree else tree)


def pack_params(params: Mapping[str, Any], *, consume: bool = False) -> dict[str, Any]:
    """Params with the matrices of every layer and of the head packed; all else is shared. A tied head
    becomes one of its own: the embedding is read by rows, the head by panels.

    Args:
        params: as `model.llama` describes them.
        consume: take the projections of the layers out of `params` as they are packed, so that all
            of them plain and all of them packed are never held together.
    """
    memory = Arena()
    layers = {i: pack_layer(one, memory, consume=consume) for i, one in params["layers"].items()}
    head = params.get("lm_head") or {"kernel": _turned(params["embed"]["embedding"])}
    return {**params, "layers": layers, "lm_head": pack_linear([head], memory)}


def _turned(embedding: Any) -> Any:
    """[V, E] -> [E, V]."""
    if isinstance(embedding, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(embedding.shape[::-1], embedding.dtype)
    return np.asarray(embedding).T


def pack_layer(
    layer: Mapping[str, Any], memory: Arena | None = None, *, consume: bool = False
) -> dict[str, Any]:
    """A layer's params with the projections of `PACKED`; all else is shared.

    Args:
        layer: {"attn": {q, k, v, o, ...}, "mlp": {gate, up, down}, ...} of numpy arrays, arrays on a
            device, or abstract arrays; each projection {"kernel": [in, out], "bias": [out] or not}.
        memory: where what is packed goes; None = where numpy puts it.
        consume: take them out of `layer`.

    Returns:
        {"attn": {qkv, o, ...}, "mlp": {gate_up, down}, ...}, each projection {"packed": [P, in, 64],
        "bias": [out] or not}.
    """
    packed = dict(layer)
    for module, name, parts in PACKED:
        if packed[module] is layer[module]:
            rest = {key: value for key, value in layer[module].items() if key not in _PARTS}
            packed[module] = rest
        make = pack_swiglu if name == "gate_up" else pack_linear
        packed[module][name] = make([layer[module][part] for part in parts], memory)
        for part in parts if consume else ():
            del layer[module][part]
    return packed


def pack_linear(parts: list[Mapping[str, Any]], memory: Arena | None = None) -> dict[str, Any]:
    """Projections of the same rows as one."""
    return _with_bias(pack([part["kernel"] for part in parts], memory), parts)


def pack_swiglu(parts: list[Mapping[str, Any]], memory: Arena | None = None) -> dict[str, Any]:
    """Gate and up as one, a piece of each in every panel; their biases end to end."""
    gate, up = (part["kernel"] for part in parts)
    return _with_bias(pack_gated(gate, up, memory), parts)


def _with_bias(packed: Any, parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    if "bias" not in parts[0]:
        return {"packed": packed}
    return {"packed": packed, "bias": _end_to_end([part["bias"] for part in parts])}


def _end_to_end(biases: list[Any]) -> Any:
    if isinstance(biases[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((sum(one.shape[0] for one in biases),), biases[0].dtype)
    if all(isinstance(one, np.ndarray) for one in biases):
        return np.concatenate(biases)
    return jnp.concatenate([jnp.asarray(one) for one in biases])
