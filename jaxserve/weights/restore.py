"""`restore_params`: the params of any checkpoint on a caller's own devices. Public, for those who train or
embed; `LLM` loads by `load_model`.

Invariant: host memory holds at most twice the largest parameter, and of an Orbax checkpoint, where
shardings are given, no parameter whole that this process does not hold whole.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.config import DTYPES
from jaxserve.device.dtypes import resolve_dtype
from jaxserve.errors import ConfigError, shown
from jaxserve.model_config import ModelConfig
from jaxserve.weights.loader import check_tensors, open_checkpoint, resolve_model
from jaxserve.weights.param_stream import ParamStream

ShardingOf = Callable[[tuple[str | int, ...]], jax.sharding.Sharding | None]


def restore_params(
    model: str | Path, *, dtype: str = "auto", sharding_of: ShardingOf | None = None
) -> tuple[dict[str, Any], ModelConfig]:
    """Reads a checkpoint onto devices, one parameter after the other.

    Args:
        model: a directory (safetensors or Orbax), a .gguf file, or a fetched name.
        dtype: of the result; "auto" = float32 on CPU, bfloat16 elsewhere.
        sharding_of: how the parameter with a path such as ("layers", 0, "attn", "q", "kernel") lies on
            devices, of other processes too; None, or a function that gives None: on the default device.

    Returns:
        (the tree that `build_engine` takes, the model's shapes and constants).

    Raises:
        CheckpointError: not found, damaged, or a model that is not served.
        ConfigError: no dtype of that name.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {shown(dtype)}")
    checkpoint = open_checkpoint(resolve_model(model))
    config = check_tensors(checkpoint)
    stream = ParamStream(checkpoint, config, resolve_dtype(dtype), bounded=True)

    def place(path: tuple[str | int, ...], array: np.ndarray) -> jax.Array:
        sharding = None if sharding_of is None else sharding_of(path)
        if sharding is None:
            return jax.block_until_ready(jax.device_put(array))
        parts = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
        return jax.block_until_ready(parts)

    return stream.take(place, sharding_of), config
