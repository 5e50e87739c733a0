"""From a loaded model to its engine: params on the device -> executor, scheduler, engine.

Called by `LLM`, and by `from_params.build_engine` for those who embed the engine. Invariant: what
`EngineConfig` leaves open is resolved here, logged once, and written nowhere else.
"""

import dataclasses
import logging
import time
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.build.join import check_processes
from jaxserve.build.kept_programs import count_programs, program_store, use_compilation_cache
from jaxserve.build.replicas import copy_to, place_replicas
from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.device.calibration import find_kv_scales
from jaxserve.device.calibration_text import calibration_ids
from jaxserve.device.choices import (
    choose_host_pages,
    choose_pool_size,
    layers_per_program,
    resolve_attention,
)
from jaxserve.device.dtypes import resolve_dtype, resolve_kv_dtype
from jaxserve.device.executor import DeviceExecutor
from jaxserve.device.params import ParamPlacer, checked_params, put_params
from jaxserve.device.placement import Placement
from jaxserve.device.programs import lower_traced
from jaxserve.device.step_shapes import StepShapes
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.executor import Executor
from jaxserve.model.kv_scales import KVScales
from jaxserve.model.registry import ModelFunctions, Params, build_model
from jaxserve.model_config import ModelConfig
from jaxserve.multihost.follower import Leader
from jaxserve.multihost.leader import Followers, LeaderExecutor
from jaxserve.plan.capacity import PoolSize
from jaxserve.plan.chips import chip_of_device
from jaxserve.plan.models import ModelSpec
from jaxserve.replicas.engine import ReplicatedEngine
from jaxserve.schedule.buckets import Buckets
from jaxserve.schedule.build import build_scheduler
from jaxserve.schedule.work_meter import WorkMeter
from jaxserve.weights.load_model import LoadedModel
from jaxserve.weights.param_stream import ParamStream
from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention.layout import is_8bit

AnyEngine = Engine | ReplicatedEngine

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StartupTimes:
    """Where the start went, in seconds: reading weights (and calibrating KV scales), compiling,
    running every program once. Importing what those need is in none of them.
    """

    load_s: float
    compile_s: float
    warm_s: float


def build_loaded(
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    mesh: jax.sharding.Mesh | None = None,
    own: bool = False,
    followers: Followers | None = None,
) -> tuple[AnyEngine, StartupTimes]:
    """Puts the params on the devices, compiles every program, makes the pages.

    Args:
        config: settings; "auto" values are resolved here and what was chosen is logged once.
        loaded: the model and its params.
        mesh: the devices to run on; None = the default one, or as many as the settings need.
        own: numpy arrays among the params may be written to afterwards, so they are copied.
        followers: the other processes, where several run the engine together.

    Returns:
        (an engine with nothing left to compile, or as many as `data_parallel_size` says behind one face;
        where the time went).

    Raises:
        ConfigError: a setting that this model, backend or machine cannot serve.
    """
    parts = _build_parts(config, loaded, mesh, own, followers)
    executors: list[Executor] = [*parts.executors]
    if followers is not None:
        executors = [LeaderExecutor(parts.executors[0], followers)]
    engines = [_build_engine(config, loaded, parts, executor) for executor in executors]
    return (ReplicatedEngine(engines) if len(engines) > 1 else engines[0]), parts.times


def build_follower(config: EngineConfig, loaded: LoadedModel, leader: Leader) -> DeviceExecutor:
    """This process's part of an engine that several run together; arguments and errors as of
    `build_loaded`.

    Args:
        leader: the line to the process that has the engine.
    """
    (executor,) = _build_parts(config, loaded, None, False, leader).executors
    return executor


class _Parts(NamedTuple):
    """Everything under an engine, or under each of several."""

    executors: list[DeviceExecutor]
    shapes: StepShapes  # of the first; the others' differ in the devices
    num_host_pages: int
    max_model_len: int
    times: StartupTimes


def _build_parts(
    config: EngineConfig,
    loaded: LoadedModel,
    mesh: jax.sharding.Mesh | None,
    own: bool,
    processes: Followers | Leader | None,
) -> _Parts:
    placement, *others = place_replicas(config.parallel, mesh)
    if processes is not None:
        check_processes(config, placement)
    cache_dir = config.compilation_cache_dir
    can_keep = cache_dir is not None and use_compilation_cache(cache_dir)
    begin = time.monotonic()
    max_model_len = _resolve_max_model_len(config, loaded.config)
    loaded = dataclasses.replace(loaded, config=loaded.config.at_context(max_model_len))
    shapes, explanation = _choose_shapes(config, loaded, max_model_len, placement)
    model = shapes.model
    params = _params_on_devices(loaded, model, placement, own)
    kv_scales = _kv_scales(config, loaded, params, shapes)
    load_s = loaded.load_s + time.monotonic() - begin

    lower = program_store(config, shapes, can_keep=can_keep) or lower_traced
    count = 1 + len(others)
    pool = choose_pool_size(config, max_model_len, shapes, lower, num_replicas=count)
    num_pages = pool.num_pages
    num_host_pages = choose_host_pages(config, shapes, pool, num_replicas=count)
    if processes is not None:  # what the smallest has room for
        num_pages = processes.agree("num_pages", num_pages)
        num_host_pages = processes.agree("num_host_pages", num_host_pages)
    shapes = dataclasses.replace(shapes, num_pages=num_pages)
    executors = [_build_executor(config, shapes, params, kv_scales, num_host_pages, can_keep)]
    for other in others:
        of_other = _choose_shapes(config, loaded, max_model_len, other)[0]
        of_other = dataclasses.replace(of_other, num_pages=num_pages)
        given = copy_to(params, other), copy_to(kv_scales, other)
        executors.append(_build_executor(config, of_other, *given, num_host_pages, can_keep))
    _log_choices(explanation, max_model_len, shapes, pool, num_host_pages, num_replicas=count)
    times = StartupTimes(
        load_s=load_s,
        compile_s=sum(executor.compile_s for executor in executors),
        warm_s=sum(executor.warm_s for executor in executors),
    )
    return _Parts(executors, shapes, num_host_pages, max_model_len, times)


def _build_executor(
    config: EngineConfig,
    shapes: StepShapes,
    params: Params,
    kv_scales: list[KVScales] | None,
    num_host_pages: int,
    can_keep: bool,
) -> DeviceExecutor:
    """One with everything compiled."""
    store = program_store(config, shapes, can_keep=can_keep)
    executor = DeviceExecutor(
        shapes,
        params,
        kv_scales=kv_scales,
        num_host_pages=num_host_pages,
        check_batches=config.check_batches,
        lower=store or lower_traced,
    )
    _LOG.info("preparing %s", count_programs(executor.list_programs(), store))
    executor.warm_up()
    if store is not None:
        store.prune()
    return executor


def _build_engine(
    config: EngineConfig, loaded: LoadedModel, parts: _Parts, executor: Executor
) -> Engine:
    shapes = parts.shapes
    return Engine(
        executor=executor,
        scheduler=build_scheduler(
            config.scheduler,
            config.cache,
            num_pages=shapes.num_pages,
            page_size=shapes.page_size,
            max_model_len=parts.max_model_len,
            num_host_pages=parts.num_host_pages,
            costs=executor.costs,
            buckets=shapes.buckets,
        ),
        vocab_size=shapes.num_ids,
        max_model_len=parts.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        seed=config.seed,
        async_scheduling=config.scheduler.async_scheduling,
        meter=_meter(config, shapes),
    )


def _meter(config: EngineConfig, shapes: StepShapes) -> WorkMeter:
    """Tells how near the steps come to the roofline of the device."""
    shares = shapes.placement.shares
    return WorkMeter.on_chip(
        ModelSpec.from_config(shapes.model.config).of_one_chip(
            shares.heads, ffn_chips=shares.ffn, vocab_chips=shares.vocab
        ),
        chip_of_device(shapes.placement.devices[0].device_kind),
        dtype=jnp.dtype(shapes.dtype).name,
        kv_cache_dtype=shapes.kv_cache_dtype,
    )


def _params_on_devices(
    loaded: LoadedModel, model: ModelFunctions, placement: Placement, own: bool
) -> Params:
    """Those of a checkpoint one after the other, so that the host never holds all of them beside it."""
    place = ParamPlacer(model, placement)
    if not isinstance(loaded.params, ParamStream):
        return put_params(
            loaded.params, model.given_params, own=own, pack=model.layout, place=place
        )
    if model.packs or (placement.platform == "cpu" and not placement.is_shared):  # used in place
        read = loaded.params.take(None)
        return put_params(read, model.given_params, pack=model.layout, consume=True, place=place)
    read = loaded.params.take(
        lambda path, array: jax.block_until_ready(place(path, array)), place.sharding_of
    )
    return checked_params(read, model.abstract_params)


def _choose_shapes(
    config: EngineConfig, loaded: LoadedModel, max_model_len: int, placement: Placement
) -> tuple[StepShapes, str]:
    """(what will be compiled, but for the size of the pool; why that attention backend)."""
    model = loaded.config
    dtype = resolve_dtype(config.dtype)
    kv_dtype = resolve_kv_dtype(config.cache.kv_cache_dtype, dtype)
    buckets = _resolve_buckets(config.scheduler, max_model_len)
    kernel, page_size, explanation = resolve_attention(
        config,
        model,
        placement,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_num_seqs=buckets.max_num_seqs,
        max_model_len=max_model_len,
    )
    max_pages = -(-max_model_len // page_size)
    shapes = StepShapes(
        model=build_model(model, dtype, kernel, placement.shares),
        buckets=buckets,
        num_pages=max_pages + 1,  # enough to compile against; replaced once the pool is sized
        page_size=page_size,
        max_pages=max_pages,
        layout=dispatch.layout_of(kernel.backend),
        dtype=dtype,
        kv_dtype=kv_dtype,
        layers_per_program=layers_per_program(model.layer_kinds),
        num_token_ids=_num_token_ids(loaded),
        placement=placement,
    )
    return shapes, explanation


def _num_token_ids(loaded: LoadedModel) -> int:
    """How many ids of the vocabulary are tokens; behind them may be padding, and more of it where
    several devices share the vocabulary.
    """
    if loaded.num_token_ids is not None:
        return loaded.num_token_ids
    vocab_size = loaded.config.vocab_size
    return vocab_size if loaded.tokenizer is None else loaded.tokenizer.end_of_ids(vocab_size)


def _log_choices(
    explanation: str,
    max_model_len: int,
    shapes: StepShapes,
    pool: PoolSize,
    num_host_pages: int,
    *,
    num_replicas: int,
) -> None:
    """What was chosen, in one line."""
    num_devices = len(shapes.placement.devices)
    padding = shapes.model.config.vocab_size - shapes.num_ids
    _LOG.info(
        "%s%s%s, dtype %s, kv_cache_dtype %s, max_model_len %d, "
        "%d KV pages of %d tokens (%.2f GiB, by %s)%s%s",
        explanation,
        f" on {num_devices} devices" if num_devices > 1 else "",
        f", {num_replicas} replicas with each" if num_replicas > 1 else "",
        jnp.dtype(shapes.dtype).name,
        shapes.kv_cache_dtype,
        max_model_len,
        pool.num_pages - 1,  # what requests can have: all but the null page
        shapes.page_size,
        pool.num_bytes / 2**30,
        pool.reason,
        f", {num_host_pages} in host RAM" if num_host_pages else "",
        f", padding of the vocabulary: {padding}" if padding else "",
    )
    rope = shapes.model.config.rope
    if rope.context_len is not None:
        _LOG.info(
            "rope_type %s: every text is turned as one of max_model_len (%d) tokens is",
            rope.rope_type,
            rope.context_len,
        )


def _resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    limit = model.longest_context
    asked = config.max_model_len
    if asked is not None and asked > limit:
        is_stated = limit == model.max_position_embeddings
        what = "max_position_embeddings" if is_stated else "original context times its rope factor"
        raise ConfigError(f"max_model_len must be at most {limit}, the model's {what}, got {asked}")
    return asked or model.max_position_embeddings


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
    config: EngineConfig, loaded: LoadedModel, params: Params, shapes: StepShapes
) -> list[KVScales] | None:
    """The scales of every layer for an 8-bit KV cache; None for float pages."""
    model = loaded.config
    if not is_8bit(shapes.kv_dtype):
        return None
    return find_kv_scales(
        config.cache.kv_cache_dtype,
        given=loaded.kv_scales,
        config=model,
        params=params,
        dtype=shapes.dtype,
        token_ids=calibration_ids(
            loaded.tokenizer,
            vocab_size=model.vocab_size,
            max_position_embeddings=model.max_position_embeddings,
        ),
        layers_per_program=shapes.layers_per_program,
        placement=shapes.placement,
    )
