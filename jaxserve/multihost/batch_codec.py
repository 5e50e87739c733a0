"""A `DeviceBatch` as the fields and arrays of a message, and back. Used by leader and followers.

    value -> null, bool, int      array -> {"array": its place}     tuple -> [...]
    Bucket, Penalties, LogitBias, CountLoad -> {"of": its name, "values": [...]}

Invariant: what is decoded equals what was encoded, field by field; a field that a batch gets later travels
without another line here.
"""

from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import Any

import numpy as np

from jaxserve.multihost.wire import WireError
from jaxserve.schedule.batch import CountLoad, DeviceBatch, LogitBias, Penalties
from jaxserve.schedule.buckets import Bucket

_PARTS = {kind.__name__: kind for kind in (Bucket, Penalties, LogitBias, CountLoad)}
_NAMES = [field.name for field in fields(DeviceBatch)]


def encode_batch(batch: DeviceBatch) -> tuple[dict[str, Any], list[np.ndarray]]:
    """(fields, arrays) of a message."""
    arrays: list[np.ndarray] = []
    return {name: _encode(getattr(batch, name), arrays) for name in _NAMES}, arrays


def decode_batch(found: dict[str, Any], arrays: Sequence[np.ndarray]) -> DeviceBatch:
    """The batch that was encoded.

    Raises:
        WireError: a message that no batch is.
    """
    try:
        return DeviceBatch(**{name: _decode(value, arrays) for name, value in found.items()})
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise WireError(f"no batch: {type(error).__name__}: {error}") from error


def _encode(value: Any, arrays: list[np.ndarray]) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if type(value) in _PARTS.values():
        parts = astuple(value) if isinstance(value, Bucket) else value
        return {"of": type(value).__name__, "values": [_encode(one, arrays) for one in parts]}
    if type(value) is tuple:
        return [_encode(one, arrays) for one in value]
    if isinstance(value, np.integer | np.bool_):
        return value.item()
    raise TypeError(f"a batch holds {type(value).__name__}, which cannot be sent")


def _decode(value: Any, arrays: Sequence[np.ndarray]) -> Any:
    if isinstance(value, list):
        return tuple(_decode(one, arrays) for one in value)
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    return _PARTS[value["of"]](*(_decode(one, arrays) for one in value["values"]))
