"""`build_engine`: an engine inside a caller's own process, from params that the caller has. Public.

    engine = build_engine(params=params, model_config=model_config)

Token ids in, token ids out; no tokenizer and no files. Invariant: nothing of the process is changed:
no setting of jax, no environment (`compilation_cache_dir` alone is process-wide, where it is asked for).
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.build.from_loaded import build_loaded
from jaxserve.config import DTYPES, EngineConfig
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError, shown
from jaxserve.field_checks import is_int, plain
from jaxserve.model.kv_scales import GivenKVScales
from jaxserve.model_config import ModelConfig
from jaxserve.replicas.engine import ReplicatedEngine
from jaxserve.weights.load_model import LoadedModel


def build_engine(
    *,
    params: Mapping[str, Any],
    model_config: ModelConfig,
    config: EngineConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    eos_token_ids: Iterable[int] | None = None,
    num_token_ids: int | None = None,
    kv_scales: GivenKVScales | None = None,
) -> Engine | ReplicatedEngine:
    """An engine with everything compiled; `Engine.add` and `Engine.step` drive it.

    Args:
        params: nested mappings of arrays as `jaxserve.model.llama` describes them, all of one dtype.
            jax arrays on the engine's devices are shared, not copied, so donate them to nothing while
            the engine lives; numpy arrays may be written to afterwards.
        model_config: the model's shapes and constants.
        config: settings; None = all by default. dtype "auto" is the dtype of the params.
        mesh: the devices that share the model, by `config.parallel.axis_rules`; None = the default one, or
            the first `tensor_parallel_size` of them.
        eos_token_ids: ids that end an output; None = those of `model_config`.
        num_token_ids: ids in [0, num_token_ids) are tokens, those behind them padding of the head that
            is never sampled; None = all of the vocabulary.
        kv_scales: scales of an 8-bit KV cache; what is not given is calibrated.

    Raises:
        ConfigError: a leaf of the params at fault, by name; a setting that this model, backend or
            machine cannot serve.
    """
    if config is None:
        config = EngineConfig()
    for name, value, kind in (
        ("model_config", model_config, ModelConfig),
        ("config", config, EngineConfig),
    ):
        if not isinstance(value, kind):
            raise ConfigError(f"{name} must be of type {kind.__name__}, got {shown(value)}")
    if kv_scales is not None and not isinstance(kv_scales, GivenKVScales):
        raise ConfigError(f"kv_scales must be GivenKVScales or None, got {shown(kv_scales)}")
    vocab_size = model_config.vocab_size
    ends = model_config.eos_token_ids if eos_token_ids is None else eos_token_ids
    if not isinstance(ends, Iterable):
        raise ConfigError(f"eos_token_ids must be a list of token ids, got {shown(ends)}")
    if num_token_ids is not None:
        num_token_ids = _checked_id("num_token_ids", num_token_ids, 1, vocab_size)
    loaded = LoadedModel(
        config=model_config,
        params=params,  # type: ignore[arg-type]
        eos_token_ids=[_checked_id("eos_token_ids", i, 0, vocab_size - 1) for i in ends],
        num_token_ids=num_token_ids,
        kv_scales=kv_scales,
    )
    if config.dtype == "auto":
        config = dataclasses.replace(config, dtype=_dtype_of(params))
    engine, _ = build_loaded(config, loaded, mesh=mesh, own=True)
    return engine


def _checked_id(name: str, value: object, low: int, high: int) -> int:
    number = plain(value)
    if not is_int(number) or not low <= number <= high:
        raise ConfigError(f"{name}: {shown(value)} is no integer in [{low}, {high}]")
    return number


def _dtype_of(params: object) -> str:
    """The dtype of the embedding, which all params share; checked leaf by leaf later on."""
    node = params
    for key in ("embed", "embedding"):
        if not isinstance(node, Mapping):
            return "auto"  # the check of the tree says what it found instead
        node = node.get(key)
    if not hasattr(node, "dtype"):
        return "auto"
    name = jnp.dtype(node.dtype).name  # type: ignore[union-attr]
    if name not in DTYPES:
        served = ", ".join(DTYPES[1:])
        raise ConfigError(f"params['embed']['embedding'] must be one of {served}, found {name}")
    return name
