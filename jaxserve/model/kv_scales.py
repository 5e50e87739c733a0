"""Scales of an 8-bit KV cache: the value of one unit of a stored key or value, per layer and kv head.

Made by `device.calibration` and `weights.kv_scales`, or by whoever embeds the engine; read by the
attention layers as traced arrays, so that one program serves every layer. Invariant: a scale that
reaches a program is finite and above 0, for keys are divided by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxserve.errors import ConfigError, shown


class KVScales(NamedTuple):
    """The scales of one layer; None stands for one that is not known and has to be calibrated."""

    k: Any = None  # f32[K]
    v: Any = None  # f32[K]


@dataclass(frozen=True, kw_only=True)
class GivenKVScales:
    """Scales that come with a model.

    Args:
        kv_cache_dtype: "int8" or "fp8_e4m3": whose units they are the value of.
        layers: one per layer, in order; f32[K] arrays, or None where there is none.
    """

    kv_cache_dtype: str
    layers: Sequence[Any]  # of KVScales; `check_given` sees to it


def largest_unit(dtype: Any) -> float:
    """The largest number of units that an element of an 8-bit pool holds on either side of 0: 127 for
    int8, 448 for float8_e4m3fn.
    """
    dtype = jnp.dtype(dtype)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)


def check_given(given: GivenKVScales, *, num_layers: int, num_kv_heads: int) -> list[KVScales]:
    """The scales as one list, if every one can be divided by.

    Args:
        given: what came with the model.
        num_layers: L.
        num_kv_heads: K.

    Returns:
        L of them, with None where there was None.

    Raises:
        ConfigError: another number of layers, or an array of the wrong shape, dtype or value; the
            message names the layer.
    """
    if len(given.layers) != num_layers:
        raise ConfigError(f"kv_scales: expected {num_layers} layers, got {len(given.layers)}")
    for layer, scales in enumerate(given.layers):
        if not isinstance(scales, KVScales):
            raise ConfigError(f"kv_scales: layer {layer} must be KVScales, got {shown(scales)}")
        for name, scale in scales._asdict().items():
            if scale is not None:
                _check_one(f"kv_scales: layer {layer}, {name}", scale, num_kv_heads)
    return list(given.layers)


def _check_one(name: str, scale: Any, num_kv_heads: int) -> None:
    is_array = hasattr(scale, "shape") and hasattr(scale, "dtype")
    if not is_array or scale.shape != (num_kv_heads,) or scale.dtype != np.float32:
        found = f"{scale.dtype}{list(scale.shape)}" if is_array else shown(scale)
        raise ConfigError(f"{name}: expected float32[{num_kv_heads}], found {found}")
    head = first_bad_head(scale)
    if head is not None:
        raise ConfigError(
            f"{name}: a scale must be a finite number above 0, got {float(scale[head])} for kv head {head}"
        )


def first_bad_head(scale: Any) -> int | None:
    """The first kv head whose scale, of f32[K], is not a normal float above 0; None if all are.

    A subnormal counts as 0: accelerators flush it.
    """
    values = np.asarray(scale)
    good = np.isfinite(values) & (values >= np.finfo(np.float32).tiny)
    return None if good.all() else int(np.argmin(good))
