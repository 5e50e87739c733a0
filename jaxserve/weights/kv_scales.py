"""KV scales of a checkpoint: the tensors that say by what an fp8 KV cache divides keys and values.

Called by `build.load_model`. Which tensors these are stands in `name_maps`; a checkpoint may have
them for every layer, for some or for none, and for keys without values.

Invariant: a scale is used as it is stored (value = stored element * scale) or the checkpoint is
refused by the tensor's name; nothing is guessed for a layer that has none.
"""

import logging

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.model.kv_scales import GivenKVScales, KVScales, first_bad_head
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.name_maps import kv_scale_parts

_LOG = logging.getLogger(__name__)

# The exporters that store scales make them for this type. They do not say how far keys reach, only
# what they chose (1.0, often enough), so a scale for 127 units cannot be computed from one for 448.
STORED_FOR = "fp8_e4m3"


def load_kv_scales(checkpoint: Checkpoint, kv_cache_dtype: str) -> GivenKVScales | None:
    """The scales that a checkpoint has for the KV cache that will be served.

    Args:
        checkpoint: from `open_checkpoint`.
        kv_cache_dtype: a key of `config.KV_CACHE_DTYPES`.

    Returns:
        Scales of "fp8_e4m3", None for what the checkpoint lacks; None where it has none at all or
        another type is served, which is said in the log if an 8-bit one could have used them.

    Raises:
        CheckpointError: a scale of the wrong shape or dtype, not finite or not above 0, or two
            tensors that disagree.
    """
    parts = {name: kv_scale_parts(name) for name in checkpoint.source.infos}
    stored = {name: part for name, part in parts.items() if part is not None}
    if not stored or kv_cache_dtype not in ("int8", STORED_FOR):
        return None
    if kv_cache_dtype != STORED_FOR:
        _LOG.info(
            "%s: its KV scales are those of %s; %s is calibrated",
            checkpoint.path,
            STORED_FOR,
            kv_cache_dtype,
        )
        return None
    tensors: dict[tuple[int, str], str] = {}  # (layer, "k" | "v" | "kv") -> name
    arrays: dict[tuple[int, str], np.ndarray] = {}  # the same -> f32[K]
    for name, part in stored.items():
        array = _read(checkpoint, name)
        if part in arrays and not np.array_equal(arrays[part], array):
            raise CheckpointError(
                f"{checkpoint.source.infos[name].file}: tensors {tensors[part]!r} and {name!r} give "
                f"different scales: {arrays[part].tolist()} and {array.tolist()}"
            )
        tensors[part], arrays[part] = name, array
    layers = []
    for layer in range(checkpoint.config.num_layers):
        both = arrays.get((layer, "kv"))
        layers.append(KVScales(*(arrays.get((layer, part), both) for part in ("k", "v"))))
    return GivenKVScales(kv_cache_dtype=STORED_FOR, layers=layers)


def _read(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """One tensor as f32[K], checked."""
    info, num_kv_heads = checkpoint.source.infos[name], checkpoint.config.num_kv_heads
    where = f"{info.file}: tensor {name!r}:"
    if not info.readable:
        readable = checkpoint.source.readable_dtypes
        raise CheckpointError(f"{where} expected dtype {readable}, found {info.dtype}")
    sizes = [size for size in info.shape if size != 1]  # [], [1], [K], [K, 1, 1]
    if sizes not in ([], [num_kv_heads]):
        raise CheckpointError(
            f"{where} expected one scale or one for each of {num_kv_heads} kv heads,"
            f" found shape {list(info.shape)}"
        )
    stored = checkpoint.source.read(name).astype(np.float32).reshape(-1)
    scale = np.array(np.broadcast_to(stored, num_kv_heads))
    head = first_bad_head(scale)
    if head is not None:
        raise CheckpointError(
            f"{where} a scale must be a finite number above 0, found {float(scale[head])}"
        )
    return scale
