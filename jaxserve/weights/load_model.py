"""`load_model`: a name -> `LoadedModel`, all that `build_loaded` needs of a checkpoint.

Called by `LLM`, and by those who embed the engine, as `jaxserve.load_model`. It imports little beside
jax, so that weights can be read while the modules of the device layer are still being imported.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxserve.config import EngineConfig
from jaxserve.device.dtypes import resolve_dtype
from jaxserve.model.kv_scales import GivenKVScales
from jaxserve.model_config import ModelConfig
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights.kv_scales import load_kv_scales
from jaxserve.weights.loader import check_tensors, open_checkpoint, resolve_model
from jaxserve.weights.param_stream import ParamStream


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to be served.

    Args:
        config: shapes and constants.
        params: nested dict of arrays as `model.llama` describes it, numpy or already on the device;
            or the stream of them, which `build_loaded` takes and places.
        tokenizer: None serves token ids only.
        eos_token_ids: the end set: generation_config, config and tokenizer together.
        generation_config: the object of generation_config.json, {} when there is none; what
            `LLM.default_sampling_params` is made of.
        num_token_ids: how many ids of the vocabulary are tokens, the rest padding of the head; None = as
            many as the tokenizer has, or all.
        kv_scales: scales for an 8-bit KV cache; what is None is calibrated. Float pages read none.
        load_s: seconds it took to load.
    """

    config: ModelConfig
    params: dict[str, Any] | ParamStream
    tokenizer: Tokenizer | None = None
    eos_token_ids: Iterable[int] = ()
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    num_token_ids: int | None = None
    kv_scales: GivenKVScales | None = None
    load_s: float = 0.0


def load_model(model: str, config: EngineConfig, *, wait: bool = True) -> LoadedModel:
    """Reads a checkpoint: a directory, a GGUF file, or a fetched name.

    Args:
        model: which one.
        config: settings; the dtype is that of the weights.
        wait: for the weights, in host memory; else `params` is a stream of them that has begun. What
            headers can tell is checked before this returns either way.

    Raises:
        CheckpointError: not found, damaged, or a model that is not served.
    """
    begin = time.monotonic()
    checkpoint = open_checkpoint(resolve_model(model))
    model_config = check_tensors(checkpoint)
    dtype = resolve_dtype(config.dtype)
    params = ParamStream(checkpoint, model_config, dtype, bounded=not wait and _is_bounded(config))
    tokenizer = None  # made while the weights are read
    if checkpoint.tokenizer_json is not None:
        tokenizer = Tokenizer(
            checkpoint.tokenizer_json, checkpoint.tokenizer_config, checkpoint.chat_template
        )
    kv_scales = load_kv_scales(checkpoint, config.cache.kv_cache_dtype)
    eos_token_ids = set(model_config.eos_token_ids)
    if tokenizer is not None:
        eos_token_ids |= set(tokenizer.eos_token_ids)
    return LoadedModel(
        config=model_config,
        params=params.take() if wait else params,
        tokenizer=tokenizer,
        eos_token_ids=sorted(eos_token_ids),
        generation_config=checkpoint.generation_config,
        kv_scales=kv_scales,
        load_s=time.monotonic() - begin,
    )


def _is_bounded(config: EngineConfig) -> bool:
    """Whether weights leave host memory again: they do, but for one device that is the CPU itself."""
    parallel = config.parallel
    several = parallel.tensor_parallel_size * parallel.data_parallel_size > 1
    return several or jax.default_backend() != "cpu"
