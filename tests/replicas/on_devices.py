"""Replicas on virtual CPU devices, run as a process of its own by `test_on_devices`. Prints JSON.

A process has several CPU devices only where it was started with them.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.build.from_params import build_engine
from jaxserve.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from jaxserve.errors import ConfigError
from jaxserve.llm import LLM
from jaxserve.model.attention import AttentionKernel
from jaxserve.model.registry import build_model
from jaxserve.model_config import ModelConfig
from jaxserve.replicas.engine import ReplicatedEngine
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.checkpoints import make_random_llama

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "token_buckets": (8,),
    "row_buckets": (4,),
    "max_model_len": 64,
    "num_pages": 6,
    "page_size": 8,
}
PROMPTS = [[5 + i, 6, 7, 8 + i] * (2 + i % 3) for i in range(8)]


def params_of(i: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=10,
        temperature=0.9 if i % 2 else 0.0,
        ignore_eos=True,
        logprobs=1,
        presence_penalty=0.5 if i == 3 else 0.0,
        n=2 if i == 4 else 1,
    )


def outputs_of(engine) -> list[list[list[int]]]:
    for i, prompt in enumerate(PROMPTS):
        engine.add(Request(id=str(i), prompt_token_ids=prompt, sampling_params=params_of(i)))
    found = {str(i): {} for i in range(len(PROMPTS))}
    while engine.has_work():
        for part in engine.step():
            for one in part.outputs:
                found[part.request_id].setdefault(one.index, []).extend(one.token_ids)
    return [[ids[index] for index in sorted(ids)] for ids in found.values()]


def devices_of(engine) -> list[list[int]]:
    """Of each replica, where its weights and its pages are."""
    found = []
    for one in engine.engines:
        executor = one.executor
        arrays = jax.tree.leaves((executor._params, executor._kv_pages))
        found.append(sorted({device.id for array in arrays for device in array.devices()}))
    return found


def main(folder: Path) -> None:
    model = make_random_llama(folder, {"num_attention_heads": 4, "num_key_value_heads": 2})
    expected = outputs_of(LLM(str(model), **(OPTIONS | {"num_pages": 64})).engine)
    compiles: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiles.append(name) if "backend_compile" in name else None
    )
    engine = LLM(str(model), **OPTIONS, data_parallel_size=2, host_kv_gib=0.001).engine
    assert isinstance(engine, ReplicatedEngine)
    num_compiled = len(compiles)
    outputs = outputs_of(engine)
    engine.check_invariants()
    found: dict[str, Any] = {
        "expected": expected,
        "outputs": outputs,
        "num_compiled": len(compiles) - num_compiled,
        "has_compiled": num_compiled > 0,
        "devices": devices_of(engine),
        "num_steps": [one.stats().num_steps for one in engine.engines],
        "num_preemptions": engine.stats().num_preemptions,
        "num_pages": engine.stats().num_pages,
        "embedded": embedded(),
    }
    for options in ({}, {"tensor_parallel_size": 4}):
        try:
            LLM(str(model), **OPTIONS, data_parallel_size=5 if not options else 2, **options)
        except ConfigError as error:
            found.setdefault("refusals", []).append(str(error))
    print(json.dumps(found))


def random_params(config: ModelConfig, seed: int) -> dict[str, Any]:
    draws = np.random.default_rng(seed)
    dtype = np.dtype(np.float32)
    abstract = build_model(config, dtype, AttentionKernel(backend="xla")).given_params
    return jax.tree.map(
        lambda leaf: draws.normal(scale=0.5, size=leaf.shape).astype(dtype), abstract
    )


def embedded() -> dict[str, Any]:
    """A caller's mesh with an axis for data, and new weights for every replica."""
    config = ModelConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    params, others = (random_params(config, seed) for seed in (0, 1))
    scheduler = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=8, token_buckets=(8,), row_buckets=(4,)
    )

    def make(given, mesh=None, **parallel):
        settings = EngineConfig(
            cache=CacheConfig(num_pages=24),
            scheduler=scheduler,
            parallel=ParallelConfig(**parallel),
        )
        return build_engine(params=given, model_config=config, config=settings, mesh=mesh)

    devices = np.array(jax.devices()).reshape(2, 2)
    mesh = Mesh(devices.T, ("model", "data"))  # the first replica has devices 0 and 1
    engine = make(params, mesh, data_parallel_size=2)
    single = make(params)
    before, before_single = outputs_of(engine), outputs_of(single)
    for one in (engine, single):
        one.update_params(others)
    after, after_single = outputs_of(engine), outputs_of(single)
    try:
        make(params, Mesh(devices, ("model", "other")), data_parallel_size=4)
        refused = "nothing was refused"
    except ConfigError as error:
        refused = str(error)
    return {
        "devices": devices_of(engine),
        "before": before == before_single,
        "after": after == after_single,
        "differ": before != after,
        "refused": refused,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
