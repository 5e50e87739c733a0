"""Weights as the C++ products take them: q, k, v as one matrix, gate and up as another, every matrix in
panels that lie in memory as they are read (`pallas_kernels.dense`), and all parameters of a layer in one
array: calling a program takes the host some time for every array that it is given.

Made by `device.params` where `ModelFunctions.layout` says how. Nothing else changes: a column of what is
joined is what it was. Invariant: a layer, or a head, is packed as a whole or not at all, and `is_packed`
tells which.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxserve.model_config import ModelConfig
from pallas_kernels.dense.cpu import Part, gated_shape, pack, pack_gated, packed_shape
from pallas_kernels.native.huge_pages import Arena

_LINE = 16  # floats: each piece begins with a line of the cache

# name of the piece -> (module, the projections that it is made of, in the order of their columns)
_PROJECTIONS = {
    "qkv": ("attn", ("q", "k", "v")),
    "o": ("attn", ("o",)),
    "gate_up": ("mlp", ("gate", "up")),
    "down": ("mlp", ("down",)),
}
_NORMS = {
    "input_norm": ("input_norm",),
    "post_attn_norm": ("post_attn_norm",),
    "q_norm": ("attn", "q_norm"),
    "k_norm": ("attn", "k_norm"),
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """Where a parameter stands in the array of its layer.

    Args:
        at: its first float.
        shape: its own.
    """

    at: int
    shape: tuple[int, ...]

    def of(self, layer: Any) -> Part:
        """As the products take it, from the layer's array."""
        return Part(layer, self.at)

    def view(self, layer: np.ndarray) -> np.ndarray:
        """Itself, to be written."""
        return layer[self.at : self.at + math.prod(self.shape)].reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class LayerLayout:
    """The pieces of a layer's array, one after the other: matrices, biases, norms.

    Args:
        pieces: (name, piece) of each that the config has: those of `_PROJECTIONS`, with "_bias" behind
            the name their biases, those of `_NORMS`.
        size: of the array, in floats.
    """

    pieces: tuple[tuple[str, Piece], ...]
    size: int

    @classmethod
    def of(cls, config: ModelConfig) -> "LayerLayout":
        """The layout of a config's layers, which are all alike."""
        outer, inner = config.hidden_size, config.intermediate_size
        q_size = config.num_heads * config.head_dim
        qkv_size = q_size + 2 * config.num_kv_heads * config.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "qkv": packed_shape(outer, qkv_size),
            "o": packed_shape(q_size, outer),
            "gate_up": gated_shape(outer, inner),
            "down": packed_shape(inner, outer),
        }
        if config.qkv_bias:
            shapes["qkv_bias"] = (qkv_size,)
        if config.o_bias:
            shapes["o_bias"] = (outer,)
        if config.mlp_bias:
            shapes |= {"gate_up_bias": (2 * inner,), "down_bias": (outer,)}
        shapes |= {"input_norm": (outer,), "post_attn_norm": (outer,)}
        if config.qk_norm:
            shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
        pieces, end = [], 0
        for name, shape in shapes.items():
            pieces.append((name, Piece(end, shape)))
            end += -(-math.prod(shape) // _LINE) * _LINE
        return cls(tuple(pieces), end)

    def part(self, name: str, layer: Any) -> Part | None:
        """A piece as the products take it; None where the config has none of that name."""
        piece = dict(self.pieces).get(name)
        return None if piece is None else piece.of(layer)


def is_packed(tree: Mapping[str, Any]) -> bool:
    """Whether the params of a layer, or of a head, are packed."""
    return "packed" in tree


def pack_params(
    params: Mapping[str, Any], layout: LayerLayout, *, consume: bool = False
) -> dict[str, Any]:
    """Params with every layer and the head packed; all else is shared. A tied head becomes one of its own:
    the embedding is read by rows, the head by panels.

    Args:
        params: as `model.llama` describes them.
        layout: of its layers.
        consume: take the projections of the layers out of `params` as they are packed, so that all
            of them plain and all of them packed are never held together.
    """
    memory = Arena()
    layers = {
        i: pack_layer(one, layout, memory, consume=consume) for i, one in params["layers"].items()
    }
    head = params.get("lm_head") or {"kernel": _turned(params["embed"]["embedding"])}
    return {**params, "layers": layers, "lm_head": pack_head(head, memory)}


def _turned(embedding: Any) -> Any:
    """[V, E] -> [E, V]."""
    if isinstance(embedding, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(embedding.shape[::-1], embedding.dtype)
    return np.asarray(embedding).T


def pack_head(head: Mapping[str, Any], memory: Arena) -> dict[str, Any]:
    """{"packed": f32[P, E, 64]} of {"kernel": [E, V]}."""
    kernel = head["kernel"]
    if isinstance(kernel, jax.ShapeDtypeStruct):
        return {"packed": pack([kernel])}
    out = memory.zeros(packed_shape(*kernel.shape), kernel.dtype)
    return {"packed": pack([kernel], out)}


def pack_layer(
    layer: Mapping[str, Any], layout: LayerLayout, memory: Arena, *, consume: bool = False
) -> dict[str, Any]:
    """A layer's params as one array.

    Args:
        layer: {"attn": {q, k, v, o, ...}, "mlp": {gate, up, down}, ...} of numpy arrays, arrays on a
            device, or abstract arrays; each projection {"kernel": [in, out], "bias": [out] or not}.
        layout: where each goes.
        memory: where the array comes from.
        consume: take projections out of `layer`.

    Returns:
        {"packed": f32[layout.size]}.
    """
    dtype = layer["input_norm"]["scale"].dtype
    if isinstance(layer["input_norm"]["scale"], jax.ShapeDtypeStruct):
        return {"packed": jax.ShapeDtypeStruct((layout.size,), dtype)}
    packed = memory.zeros((layout.size,), dtype)
    views = {name: piece.view(packed) for name, piece in layout.pieces}
    for name, (module, parts) in _PROJECTIONS.items():
        projections = [layer[module][part] for part in parts]
        kernels = [one["kernel"] for one in projections]
        if name == "gate_up":
            pack_gated(kernels[0], kernels[1], views[name])
        else:
            pack(kernels, views[name])
        if f"{name}_bias" in views:
            views[f"{name}_bias"][:] = np.concatenate([one["bias"] for one in projections])
        for part in parts if consume else ():
            del layer[module][part]
        del projections, kernels
    for name, path in _NORMS.items():
        if name in views:
            norm = layer
            for key in path:
                norm = norm[key]
            views[name][:] = norm["scale"]
    return {"packed": packed}
