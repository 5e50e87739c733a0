"""How fast is the whole engine on this device? Random weights, beside a plain dense-cache decode loop.

The engine is put together from its parts, with a ladder of the few buckets that are measured, so that
compiling does not take the time that measuring needs. The peer is what one writes without an engine:
keys and values in one dense array per layer, every sequence of the same length, one program a step.
"""

import functools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.device.executor import DeviceExecutor, StepShapes
from jaxserve.device.params import put_params
from jaxserve.device.programs import Program, ProgramTable
from jaxserve.engine import Engine
from jaxserve.model.attention import AttentionKernel
from jaxserve.model.layers import linear
from jaxserve.model.registry import ModelFunctions, Params, build_model
from jaxserve.model.rope import inverse_frequencies, rotate, rotation
from jaxserve.model_config import ModelConfig
from jaxserve.request import Request, SamplingParams
from jaxserve.schedule.buckets import Buckets
from jaxserve.schedule.build import build_scheduler
from pallas_kernels import dispatch
from scripts.device.report import Deadline, Row

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
CONTEXT = PROMPT_TOKENS + OUTPUT_TOKENS


def random_params(model: ModelFunctions) -> Params:
    """Normal weights of deviation 0.02, made on the device."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key, shape, dtype):
        return (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    leaves, tree = jax.tree.flatten(model.abstract_params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, made)


def make_engine(
    model: ModelFunctions, params: Params, batches: list[int], chunk: int, page_size: int
) -> tuple[Engine, DeviceExecutor]:
    """An engine whose ladder holds the batches and one chunk."""
    most = max(batches)
    max_pages = -(-CONTEXT // page_size)
    buckets = Buckets(
        max_num_seqs=most,
        max_num_batched_tokens=max(chunk, most),
        tokens=tuple(sorted({*batches, max(chunk, most)})),
        rows=tuple(batches),
    )
    layers = model.config.num_layers
    shapes = StepShapes(
        model=model,
        buckets=buckets,
        num_pages=most * max_pages + 1,
        page_size=page_size,
        max_pages=max_pages,
        layout=dispatch.layout_of(model.kernel.backend),
        dtype=params["embed"]["embedding"].dtype,
        kv_dtype=params["embed"]["embedding"].dtype,
        layers_per_program=max(n for n in range(1, 9) if layers % n == 0),
    )
    placed = put_params(params, model.abstract_params, pack=model.layout)
    executor = DeviceExecutor(shapes, placed)
    executor.warm_up()
    scheduler = build_scheduler(
        SchedulerConfig(),
        CacheConfig(enable_prefix_caching=False),
        num_pages=shapes.num_pages,
        page_size=page_size,
        max_model_len=CONTEXT,
        buckets=buckets,
    )
    vocab_size = model.config.vocab_size
    engine = Engine(
        executor=executor, scheduler=scheduler, vocab_size=vocab_size, max_model_len=CONTEXT
    )
    return engine, executor


def engine_figures(engine: Engine, num_seqs: int) -> dict[str, float]:
    """Tokens a second of a batch that arrives at once: of the whole, and once all of it decodes."""
    vocab_size = engine.vocab_size
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for i in range(num_seqs):
        prompt = [(7 * i + 13 * j) % vocab_size for j in range(PROMPT_TOKENS)]
        engine.add(Request(id=str(i), prompt_token_ids=prompt, sampling_params=params))
    started: set[str] = set()
    produced, begin = 0, time.perf_counter()
    while len(started) < num_seqs:
        outputs = engine.step()
        produced += sum(len(o.outputs[0].token_ids) for o in outputs)
        started |= {o.request_id for o in outputs}
    all_decode, by_then = time.perf_counter(), produced
    while engine.has_work():
        produced += sum(len(o.outputs[0].token_ids) for o in engine.step())
    end = time.perf_counter()
    return {
        "decode_tokens_per_s": (produced - by_then) / (end - all_decode),
        "tokens_per_s": produced / (end - begin),
        "prompt_tokens_per_s": num_seqs * PROMPT_TOKENS / (all_decode - begin),
    }


def dense_step(
    model: ModelFunctions, params: Params, cache: list, ids: jax.Array, position: jax.Array
):
    """One token of each of B sequences that all stand at `position`: (the next ids i32[B], cache).

    The cache is (keys, values) [B, CONTEXT, K, D] for each layer.
    """
    config = model.config
    x = model.embed(params["embed"], ids)
    batch = ids.shape[0]
    positions = jnp.broadcast_to(position, (batch,))
    cos, sin = rotation(inverse_frequencies(config.rope, config.head_dim), positions)
    seen = jnp.arange(CONTEXT, dtype=jnp.int32) <= position
    new_cache = []
    for layer, (keys, values) in zip(model.layer_params(params), cache, strict=True):
        h = _norm(x, layer["input_norm"]["scale"], config.rms_norm_eps)
        q, k, v = (
            linear(h, layer["attn"][name]["kernel"]).reshape(batch, -1, config.head_dim)
            for name in "qkv"
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        keys = jax.lax.dynamic_update_slice_in_dim(keys, k[:, None], position, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(values, v[:, None], position, axis=1)
        q = q.reshape(batch, config.num_kv_heads, -1, config.head_dim)
        scores = jnp.einsum("bkgd,bckd->bkgc", q, keys).astype(jnp.float32)
        scores = jnp.where(seen[None, None, None], scores * config.head_dim**-0.5, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bkgc,bckd->bkgd", weights, values).reshape(batch, -1)
        x = x + linear(mixed, layer["attn"]["o"]["kernel"])
        h = _norm(x, layer["post_attn_norm"]["scale"], config.rms_norm_eps)
        gate, up = (linear(h, layer["mlp"][name]["kernel"]) for name in ("gate", "up"))
        x = x + linear(jax.nn.silu(gate) * up, layer["mlp"]["down"]["kernel"])
        new_cache.append((keys, values))
    logits = model.logits(model.head_params(params), x)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), new_cache


def _norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)[None, :]).astype(x.dtype)


def dense_cache(config: ModelConfig, batch: int, dtype, make=jnp.zeros) -> list:
    """(keys, values) of each layer."""
    shape = (batch, CONTEXT, config.num_kv_heads, config.head_dim)
    return [(make(shape, dtype), make(shape, dtype)) for _ in range(config.num_layers)]


def dense_tokens_per_s(step, params: Params, config: ModelConfig, batch: int, dtype) -> float:
    """Decode tokens a second, over a cache that holds PROMPT_TOKENS zeros."""
    cache = dense_cache(config, batch, dtype)
    ids = jnp.zeros(batch, jnp.int32)
    ids, cache = step(params, cache, ids, jnp.int32(PROMPT_TOKENS))
    ids.block_until_ready()
    begin = time.perf_counter()
    for position in range(PROMPT_TOKENS + 1, CONTEXT):
        ids, cache = step(params, cache, ids, jnp.int32(position))
    ids.block_until_ready()
    return batch * (CONTEXT - PROMPT_TOKENS - 1) / (time.perf_counter() - begin)


def serve(
    config: ModelConfig,
    backend: str,
    *,
    dtype: str,
    page_size: int,
    batches: list[int],
    chunk: int,
    deadline: Deadline,
) -> Iterator[Row]:
    """Tokens a second of the engine and of the dense loop, at each number of sequences."""
    model = build_model(config, jnp.dtype(dtype), AttentionKernel(backend=backend))
    params = jax.block_until_ready(random_params(model))
    engine, executor = make_engine(model, params, batches, chunk, page_size)
    yield Row(
        part="engine",
        name="start",
        figures={"compile_s": executor.compile_s, "warm_s": executor.warm_s},
    )
    for batch in batches:
        if deadline.left_s() < 0:
            yield Row(part="engine", name=f"{batch} seqs", figures={"skipped": "out of time"})
            continue
        engine_figures(engine, batch)  # once for the caches of host and device
        yield Row(part="engine", name=f"{batch} seqs engine", figures=engine_figures(engine, batch))
    del engine, executor
    if deadline.left_s() < 0:
        yield Row(part="engine", name="dense loop", figures={"skipped": "out of time"})
        return
    table = ProgramTable()
    table.compile_all([dense_program(model, batch, dtype) for batch in reversed(batches)])
    for batch in batches:
        rate = dense_tokens_per_s(table["dense", batch], params, config, batch, dtype)
        yield Row(
            part="engine", name=f"{batch} seqs dense loop", figures={"decode_tokens_per_s": rate}
        )


def dense_program(model: ModelFunctions, batch: int, dtype: str) -> Program:
    """The peer's step for a batch, to compile."""
    cache = dense_cache(model.config, batch, jnp.dtype(dtype), make=jax.ShapeDtypeStruct)
    ids, position = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch,), ()))
    return Program(
        key=("dense", batch),
        function=functools.partial(dense_step, model),
        arguments=(model.abstract_params, cache, ids, position),
        donated=(1,),
    )
