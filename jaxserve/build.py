"""The one place that makes parts: checkpoint -> params on the device -> executor, scheduler,
engine.

Called by `LLM` and by those who embed the engine with params of their own: make a `LoadedModel`,
pass it to `build_engine`.
"""

import dataclasses
import logging
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.device.calibration import find_kv_scales
from jaxserve.device.calibration_text import calibration_ids
from jaxserve.device.choices import (
    choose_host_pages,
    choose_pool_size,
    layers_per_program,
    resolve_attention,
)
from jaxserve.device.compiled_entries import remove_damaged
from jaxserve.device.dtypes import resolve_dtype, resolve_kv_dtype
from jaxserve.device.executor import DeviceExecutor
from jaxserve.device.params import put_params
from jaxserve.device.program_identity import identity
from jaxserve.device.program_store import ProgramStore
from jaxserve.device.programs import Program, lower_traced
from jaxserve.device.step_shapes import StepShapes
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.model.kv_scales import KVScales
from jaxserve.model.registry import Params, build_model
from jaxserve.model_config import ModelConfig
from jaxserve.plan.capacity import PoolSize
from jaxserve.schedule.buckets import Buckets
from jaxserve.schedule.build import build_scheduler
from jaxserve.weights.load_model import LoadedModel, load_model
from pallas_kernels import dispatch
from pallas_kernels.native import load as native
from pallas_kernels.ragged_paged_attention.layout import is_8bit

__all__ = ["LoadedModel", "StartupTimes", "build_engine", "load_model"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StartupTimes:
    """Where the start went, in seconds: reading weights (and calibrating KV scales), compiling,
    running every program once. Importing what those need is in none of them.
    """

    load_s: float
    compile_s: float
    warm_s: float


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
    shapes, explanation = _choose_shapes(config, loaded, max_model_len)
    model = shapes.model
    given = loaded.params.result() if isinstance(loaded.params, Future) else loaded.params
    params = put_params(given, model.abstract_params, pack=model.packs)
    kv_scales = _kv_scales(config, loaded, params, shapes.dtype)
    load_s = loaded.load_s + time.monotonic() - begin

    lower = _program_store(config, shapes) or lower_traced
    pool = choose_pool_size(config, max_model_len, shapes, lower)
    shapes = dataclasses.replace(shapes, num_pages=pool.num_pages)
    num_host_pages = choose_host_pages(config, shapes, pool)
    store = _program_store(config, shapes)
    executor = DeviceExecutor(
        shapes,
        params,
        kv_scales=kv_scales,
        num_host_pages=num_host_pages,
        check_batches=config.check_batches,
        lower=store or lower_traced,
    )
    _LOG.info("preparing %s", _count_programs(executor.list_programs(), store))
    executor.warm_up()
    if store is not None:
        store.prune()
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
            buckets=shapes.buckets,
        ),
        vocab_size=shapes.num_ids,
        max_model_len=max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        seed=config.seed,
        async_scheduling=config.scheduler.async_scheduling,
    )
    _log_choices(explanation, max_model_len, shapes, pool, num_host_pages)
    times = StartupTimes(load_s=load_s, compile_s=executor.compile_s, warm_s=executor.warm_s)
    return engine, times


def _choose_shapes(
    config: EngineConfig, loaded: LoadedModel, max_model_len: int
) -> tuple[StepShapes, str]:
    """(what will be compiled, but for the size of the pool; why that attention backend)."""
    model = loaded.config
    dtype = resolve_dtype(config.dtype)
    kv_dtype = resolve_kv_dtype(config.cache.kv_cache_dtype, dtype)
    buckets = _resolve_buckets(config.scheduler, max_model_len)
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
        num_token_ids=None
        if loaded.tokenizer is None
        else loaded.tokenizer.end_of_ids(model.vocab_size),
    )
    return shapes, explanation


def _log_choices(
    explanation: str, max_model_len: int, shapes: StepShapes, pool: PoolSize, num_host_pages: int
) -> None:
    """What was chosen, in one line."""
    padding = shapes.model.config.vocab_size - shapes.num_ids
    _LOG.info(
        "%s, dtype %s, kv_cache_dtype %s, max_model_len %d, %d KV pages of %d tokens (%.2f GiB, by %s)%s%s",
        explanation,
        jnp.dtype(shapes.dtype).name,
        shapes.kv_cache_dtype,
        max_model_len,
        pool.num_pages - 1,  # what requests can have: all but the null page
        shapes.page_size,
        pool.num_bytes / 2**30,
        pool.reason,
        f", {num_host_pages} in host RAM" if num_host_pages else "",
        f", {padding} ids of the vocabulary are padding" if padding else "",
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
    remove_damaged(Path(folder).expanduser())
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # jax looks at the folder once, when it first compiles anything


def _program_store(config: EngineConfig, shapes: StepShapes) -> ProgramStore | None:
    """Where lowered programs are kept; None where no folder was given."""
    if config.compilation_cache_dir is None or shapes.model.kernel.interpret:
        return None  # an interpreter calls back into this process, which no file can hold
    if native.missing() is None:
        native.register()  # tracing does it too, but kept programs are not traced
    folder = Path(config.compilation_cache_dir).expanduser() / "programs"
    return ProgramStore(folder, identity(shapes), native.TARGETS)


def _count_programs(programs: Sequence[Program], store: ProgramStore | None) -> str:
    """How many there are, and how many of them an earlier start left behind."""
    if store is not None:
        return f"{len(programs)} programs, {store.count(programs)} of them from an earlier start"
    kept = jax.config.jax_compilation_cache_dir
    return (
        f"{len(programs)} programs{'' if kept else ' (no compilation_cache_dir: at every start)'}"
    )


def _resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    asked = config.max_model_len
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len must be at most {limit}, the model's max_position_embeddings, got {asked}"
        )
    return asked or limit


def _resolve_buckets(asked: SchedulerConfig, max_model_len: int) -> Buckets:
    """The ladders; what no step can fill is not compiled."""
    max_num_batched_tokens = asked.max_num_batched_tokens
    if asked.token_buckets is None:
        most = asked.max_num_seqs * max_model_len  # every sequence with all of its context
        max_num_batched_tokens = min(max_num_batched_tokens, most)
    buckets = Buckets.make(
        max_num_seqs=asked.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        tokens=asked.token_buckets,
        rows=asked.row_buckets,
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
