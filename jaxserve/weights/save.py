"""The weights of an opened checkpoint as they are to be written: tensors with Hugging Face names, or
parameters with their paths.

Called by `convert` and `fetch`. Each is read when it is written, in blocks.

Invariant: a value is the stored one, or that value in the dtype that was asked for; one that it cannot
hold is an error.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.model_config import ModelConfig
from jaxserve.weights import name_maps
from jaxserve.weights.checkpoint import Checkpoint, TensorInfo
from jaxserve.weights.name_maps import ParamSpec
from jaxserve.weights.param_stream import aligned_empty, read_param, rows_at_a_time
from jaxserve.weights.safetensors_writer import UnwrittenTensor

# The words of the formats for elements of 16 bits; all else is read as float32.
_HALF = {"F16": "float16", "float16": "float16", "BF16": "bfloat16", "bfloat16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class UnreadParam:
    """A parameter that is read when it is written.

    Args:
        spec: which one, as the checkpoint holds it.
        dtype: as which it is read.
        checkpoint: where it is read from.
    """

    spec: ParamSpec
    dtype: np.dtype
    checkpoint: Checkpoint

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the params tree."""
        return self.spec.tree_shape

    def read(self) -> np.ndarray:
        """The array, in memory of our own.

        Raises:
            CheckpointError: it cannot be read, or holds a value that the dtype cannot.
        """
        stored = stored_dtype(self.checkpoint.source.infos[self.spec.name])
        array = read_param(self.checkpoint, self.spec, stored)
        if stored == self.dtype:
            return array
        result = aligned_empty(array.shape, self.dtype)
        step = rows_at_a_time(array.shape)
        for begin in range(0, len(array), step):
            rows = slice(begin, begin + step)
            result[rows] = cast(array[rows], self.dtype, self.spec.name)
        return result


def unread_params(
    checkpoint: Checkpoint, config: ModelConfig, dtype: np.dtype | None
) -> list[UnreadParam]:
    """Every parameter of the model.

    Args:
        checkpoint: from `open_checkpoint`.
        config: from `check_tensors`.
        dtype: of all of them; None = each as it is stored (quantised ones as float32).
    """
    infos = checkpoint.source.infos
    return [
        UnreadParam(spec=spec, dtype=dtype or stored_dtype(infos[spec.name]), checkpoint=checkpoint)
        for spec in checkpoint.param_specs(config)
    ]


def unwritten_tensors(
    checkpoint: Checkpoint, config: ModelConfig, dtype: np.dtype | None
) -> list[UnwrittenTensor]:
    """Every tensor of the model under its Hugging Face name, and the scales of the KV cache.

    Args:
        checkpoint, config, dtype: as for `unread_params`; scales keep their dtype.
    """
    if checkpoint.holds_params:
        tensors = list(_assembled(checkpoint, config, dtype))
    else:
        names = dict.fromkeys(spec.name for spec in name_maps.param_specs(config))
        tensors = [_as_stored(checkpoint, name, dtype) for name in names]
    return tensors + kv_scale_tensors(checkpoint)


def kv_scale_tensors(checkpoint: Checkpoint) -> list[UnwrittenTensor]:
    """The scales of the KV cache, which belong to no params tree."""
    names = [name for name in checkpoint.source.infos if name_maps.kv_scale_parts(name)]
    return [_as_stored(checkpoint, name, None) for name in names]


def _as_stored(checkpoint: Checkpoint, name: str, dtype: np.dtype | None) -> UnwrittenTensor:
    info = checkpoint.source.infos[name]
    target = dtype or stored_dtype(info)

    def blocks() -> Iterator[np.ndarray]:
        if not info.shape:
            yield cast(checkpoint.source.read(name), target, name)
            return
        step = rows_at_a_time(info.shape, info.block_rows)
        for begin in range(0, info.shape[0], step):
            end = min(begin + step, info.shape[0])
            yield cast(checkpoint.source.read(name, begin, end), target, name)

    return UnwrittenTensor(name=name, dtype=target, shape=info.shape, blocks=blocks)


def _assembled(
    checkpoint: Checkpoint, config: ModelConfig, dtype: np.dtype | None
) -> Iterator[UnwrittenTensor]:
    """Tensors made of the parameters that a checkpoint holds: turned round, and joined where one
    tensor has several of them."""
    groups: dict[str, list[ParamSpec]] = {}
    for spec in name_maps.param_specs(config):
        groups.setdefault(spec.name, []).append(spec)
    for name, specs in groups.items():
        in_order = sorted(specs, key=lambda spec: spec.first_row)
        infos = [checkpoint.source.infos[spec.as_param().name] for spec in in_order]
        stored = {stored_dtype(info) for info in infos}
        target = dtype or (stored.pop() if len(stored) == 1 else np.dtype(np.float32))
        yield UnwrittenTensor(
            name=name,
            dtype=target,
            shape=specs[0].stored_shape,
            blocks=lambda specs=in_order, target=target: _turned(checkpoint, specs, target),
        )


def _turned(
    checkpoint: Checkpoint, specs: Sequence[ParamSpec], dtype: np.dtype
) -> Iterable[np.ndarray]:
    for spec in specs:
        param = UnreadParam(spec=spec.as_param(), dtype=dtype, checkpoint=checkpoint).read()
        stored = param.T if spec.transpose else param
        step = rows_at_a_time(stored.shape)
        for begin in range(0, len(stored), step):
            yield stored[begin : begin + step]


def stored_dtype(info: TensorInfo) -> np.dtype:
    """The dtype that holds every value of a tensor as it is read."""
    return np.dtype(_HALF.get(info.dtype, "float32"))


def cast(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """The same values in another dtype, rounded.

    Raises:
        CheckpointError: a finite value that the dtype has no finite value for.
    """
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(dtype)
    lost = np.isinf(result) & np.isfinite(array)
    if lost.any():
        value = float(array[lost][0])
        raise CheckpointError(f"tensor {name!r}: {dtype} cannot hold its value {value}")
    return result
