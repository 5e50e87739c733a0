"""The one place that makes parts: checkpoint -> params on the device -> executor, scheduler,
engine.

Called by `LLM` and by those who embed the engine with params of their own: make a `LoadedModel`,
pass it to `build_engine`.
"""

import dataclasses
import logging
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.config import EngineConfig
from jaxserve.device.calibration import find_kv_scales
from jaxserve.device.calibration_text import calibration_ids
from jaxserve.device.choices import (
    choose_host_pages,
    choose_pool_size,
    layers_per_program,
    resolve_attention,
    resolve_dtype,
    resolve_kv_dtype,
)
from jaxserve.device.executor import DeviceExecutor
from jaxserve.device.params import put_params
from jaxserve.device.step_shapes import StepShapes
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.model.kv_scales import GivenKVScales, KVScales
from jaxserve.model.registry import Params, build_model
from jaxserve.model_config import ModelConfig
from jaxserve.plan.capacity import PoolSize
from jaxserve.schedule.buckets import Buckets
from jaxserve.schedule.build import build_scheduler
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights.kv_scales import load_kv_scales
from jaxserve.weights.loader import load_params, open_checkpoint, resolve_model
from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention.layout import is_8bit

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to be served.

    Args:
        config: shapes and constants.
        params: nested dict of arrays as `model.llama` describes it; numpy, or already on the
            device.
        tokenizer: None serves token ids only.
        eos_token_ids: the end set: generation_config, config and tokenizer together.
        kv_scales: scales for an 8-bit KV cache; what is None is calibrated. Float pages read none.
        load_s: seconds it took to load.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None = None
    eos_token_ids: Iterable[int] = ()
    kv_scales: GivenKVScales | None = None
    load_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StartupTimes:
    """Where the start went, in seconds: reading weights (and calibrating KV scales), compiling,
    running every program once.
    """

    load_s: float
    compile_s: float
    warm_s: float


def load_model(model: str, config: EngineConfig) -> LoadedModel:
    """Reads a checkpoint: a directory, a GGUF file, or a fetched name.

    Raises:
        CheckpointError: not found, damaged, or a model that is not served.
    """
    begin = time.monotonic()
    checkpoint = open_checkpoint(resolve_model(model))
    tokenizer = None
    if checkpoint.tokenizer_json is not None:
        tokenizer = Tokenizer(
            checkpoint.tokenizer_json, checkpoint.tokenizer_config, checkpoint.chat_template
        )
    kv_scales = load_kv_scales(checkpoint, config.cache.kv_cache_dtype)
    params, model_config = load_params(checkpoint, resolve_dtype(config.dtype))
    eos_token_ids = set(model_config.eos_token_ids)
    if tokenizer is not None:
        eos_token_ids |= set(tokenizer.eos_token_ids)
    return LoadedModel(
        config=model_config,
        params=params,
        tokenizer=tokenizer,
        eos_token_ids=sorted(eos_token_ids),
        kv_scales=kv_scales,
        load_s=time.monotonic() - begin,
    )


def build_engine(config: EngineConfig, loaded: LoadedModel) -> tuple[Engine, StartupTimes]:
    """Puts the params on the device, compiles every program, makes the pages.

    Args:
        config: settings; "auto" values are resolved here and what was chosen is logged once.
        loaded: the model and its params.

    Returns:
        (an engine with nothing left to compile, where the time went).

    Raises:
        ConfigError: a setting that this model, backend or machine cannot serve.
    """
    if config.compilation_cache_dir is not None:
        _use_compilation_cache(config.compilation_cache_dir)
    begin = time.monotonic()
    max_model_len = _resolve_max_model_len(config, loaded.config)
    shapes, explanation = _choose_shapes(config, loaded.config, max_model_len)
    model = shapes.model
    params = put_params(loaded.params, model.abstract_params, join=model.joins)
    kv_scales = _kv_scales(config, loaded, params, shapes.dtype)
    load_s = loaded.load_s + time.monotonic() - begin

    pool = choose_pool_size(config, max_model_len, shapes)
    shapes = dataclasses.replace(shapes, num_pages=pool.num_pages)
    num_host_pages = choose_host_pages(config, shapes, pool)
    executor = DeviceExecutor(
        shapes,
        params,
        kv_scales=kv_scales,
        num_host_pages=num_host_pages,
        check_batches=config.check_batches,
    )
    kept = jax.config.jax_compilation_cache_dir
    again = "" if kept else " (no compilation_cache_dir: at every start)"
    _LOG.info("compiling %d programs%s", len(executor.list_programs()), again)
    executor.warm_up()
    engine = Engine(
        executor=executor,
        scheduler=build_scheduler(
            config.scheduler,
            config.cache,
            num_pages=pool.num_pages,
            page_size=shapes.page_size,
            max_model_len=max_model_len,
            num_host_pages=num_host_pages,
            costs=executor.costs,
        ),
        vocab_size=loaded.config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        seed=config.seed,
        async_scheduling=config.scheduler.async_scheduling,
    )
    _log_choices(explanation, max_model_len, shapes, pool, num_host_pages)
    times = StartupTimes(load_s=load_s, compile_s=executor.compile_s, warm_s=executor.warm_s)
    return engine, times


def _choose_shapes(
    config: EngineConfig, model: ModelConfig, max_model_len: int
) -> tuple[StepShapes, str]:
    """(what will be compiled, but for the size of the pool; why that attention backend)."""
    dtype = resolve_dtype(config.dtype)
    kv_dtype = resolve_kv_dtype(config.cache.kv_cache_dtype, dtype)
    buckets = _resolve_buckets(config)
    kernel, page_size, explanation = resolve_attention(
        config,
        model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_num_seqs=buckets.max_num_seqs,
        max_model_len=max_model_len,
    )
    max_pages = -(-max_model_len // page_size)
    shapes = StepShapes(
        model=build_model(model, dtype, kernel),
        buckets=buckets,
        num_pages=max_pages + 1,  # enough to compile against; replaced once the pool is sized
        page_size=page_size,
        max_pages=max_pages,
        layout=dispatch.layout_of(kernel.backend),
        dtype=dtype,
        kv_dtype=kv_dtype,
        layers_per_program=layers_per_program(model.num_layers),
    )
    return shapes, explanation


def _log_choices(
    explanation: str, max_model_len: int, shapes: StepShapes, pool: PoolSize, num_host_pages: int
) -> None:
    """What was chosen, in one line."""
    _LOG.info(
        "%s, dtype %s, kv_cache_dtype %s, max_model_len %d, %d KV pages of %d tokens (%.2f GiB, by %s)%s",
        explanation,
        jnp.dtype(shapes.dtype).name,
        shapes.kv_cache_dtype,
        max_model_len,
        pool.num_pages - 1,  # what requests can have: all but the null page
        shapes.page_size,
        pool.num_bytes / 2**30,
        pool.reason,
        f", {num_host_pages} in host RAM" if num_host_pages else "",
    )


def _use_compilation_cache(folder: str | Path) -> None:
    """Asked for by name, so jax's process-wide settings may change."""
    try:
        Path(folder).expanduser().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=Path(folder).expanduser()):
            pass
    except OSError as error:
        _LOG.warning("compilation_cache_dir %s cannot be used: %s", folder, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # jax looks at the folder once, when it first compiles anything


def _resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    asked = config.max_model_len
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len must be at most {limit}, the model's max_position_embeddings, got {asked}"
        )
    return asked or limit


def _resolve_buckets(config: EngineConfig) -> Buckets:
    asked = config.scheduler
    buckets = Buckets.make(
        max_num_seqs=asked.max_num_seqs, max_num_batched_tokens=asked.max_num_batched_tokens
    )
    if buckets.max_num_seqs < asked.max_num_seqs:
        _LOG.warning(
            "max_num_seqs lowered from %d to %d: each running sequence needs a token of the step's "
            "max_num_batched_tokens",
            asked.max_num_seqs,
            buckets.max_num_seqs,
        )
    return buckets


def _kv_scales(
    config: EngineConfig, loaded: LoadedModel, params: Params, dtype: jnp.dtype
) -> list[KVScales] | None:
    """The scales of every layer for an 8-bit KV cache; None for float pages."""
    model = loaded.config
    if not is_8bit(resolve_kv_dtype(config.cache.kv_cache_dtype, dtype)):
        return None
    return find_kv_scales(
        config.cache.kv_cache_dtype,
        given=loaded.kv_scales,
        config=model,
        params=params,
        dtype=dtype,
        token_ids=calibration_ids(
            loaded.tokenizer,
            vocab_size=model.vocab_size,
            max_position_embeddings=model.max_position_embeddings,
        ),
        layers_per_program=layers_per_program(model.num_layers),
    )
