"""Prints, as JSON, what engines on one, two and four devices make of the same work: run by
test_tensor_parallel.

The caller's environment makes the CPU four devices, which must be so before jax is imported.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from jaxserve import LLM, AxisRules, Engine, EngineConfig, Request, SamplingParams, build_engine
from jaxserve.device.compile_counter import CompileCounter
from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig
from jaxserve.request import RequestOutput, merge_outputs
from jaxserve.weights.loader import load_params, open_checkpoint
from tests.checkpoints import make_random_llama

# Two KV heads, so that four devices have copies; a vocabulary that neither two nor four divide.
CONFIG = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "attention_bias": True,
    "tie_word_embeddings": True,
}
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "row_buckets": (4,),
    "max_model_len": 64,
    "num_pages": 28,
    "page_size": 4,
    "host_kv_gib": 0.001,
    "preemption_mode": "swap",
    "check_batches": True,
}
PREFIX = list(range(3, 20))
Given = tuple[dict[str, Any], ModelConfig]


def build(given: Given, size: int, mesh: jax.sharding.Mesh | None = None, **options: Any) -> Engine:
    params, config = given
    options = OPTIONS | {"tensor_parallel_size": size} | options
    engine = build_engine(
        params=params, model_config=config, config=EngineConfig.from_options(options), mesh=mesh
    )
    return cast(Engine, engine)


def run(engine: Engine, requests: Mapping[str, tuple[list[int], Mapping[str, Any]]]) -> dict:
    """What becomes of requests that are all there at once, by name."""
    parts: dict[str, list[RequestOutput]] = {}
    for name, (prompt, fields) in requests.items():
        params = SamplingParams(ignore_eos=True, **fields)
        engine.add(Request(id=name, prompt_token_ids=prompt, sampling_params=params))
    while engine.has_work():
        for part in engine.step():
            parts.setdefault(part.request_id, []).append(part)
    engine.check_invariants()
    return {name: described(merge_outputs(parts[name])) for name in requests}


def described(output: RequestOutput) -> dict:
    return {
        "cached": output.num_cached_tokens,
        "token_ids": [list(one.token_ids) for one in output.outputs],
        "logprobs": [list(one.logprobs or ()) for one in output.outputs],
    }


GREEDY = {"temperature": 0.0, "max_tokens": 12, "logprobs": True}
DRAWN = {"temperature": 1.0, "max_tokens": 12, "logprobs": True}
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
FIRST = {
    "greedy": (PREFIX, GREEDY),
    "seeded": ([5, 9, 11], DRAWN | {"seed": 3, "top_p": 0.9, "top_k": 40}),
    "choices": ([7, 7, 30], DRAWN | {"seed": 4, "n": 3}),
    "penalties": ([40, 41, 42], GREEDY | PENALTIES | {"logit_bias": {96: 2.0, 3: -1.0}}),
}
HIT = {"hit": ([*PREFIX, 50, 51], GREEDY)}
# Eight requests that need more pages than there are: some are swapped to host RAM and back.
PRESSED = {
    f"pressed {i}": (
        [(11 * i + 7 * j) % 97 for j in range(20)],
        (DRAWN | {"seed": i, "max_tokens": 20}),
    )
    for i in range(8)
}


def forked(engine: Engine) -> dict:
    """A sequence that goes on twice, the second time with a draw of its own."""
    engine.add(Request(id="trunk", prompt_token_ids=PREFIX, sampling_params=params(GREEDY)))
    parts = [part for _ in range(6) for part in engine.step()]
    engine.fork("trunk", "branch", sampling_params=params(DRAWN | {"seed": 9}))
    while engine.has_work():
        parts += engine.step()
    found = {"trunk": [], "branch": []}
    for part in parts:
        found[part.request_id].append(part)
    return {name: described(merge_outputs(ones)) for name, ones in found.items()}


def params(fields: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(ignore_eos=True, **fields)


def load(model: Path, size: int, **options: Any) -> Engine:
    """As `build`, from a checkpoint: weights go to the devices one by one as they are read."""
    return cast(Engine, LLM(str(model), tensor_parallel_size=size, **(OPTIONS | options)).engine)


def all_work(engine: Engine, other: Given) -> dict:
    """Everything that a test compares, of one engine."""
    counter = CompileCounter()
    found = run(engine, FIRST) | run(engine, HIT) | run(engine, PRESSED) | forked(engine)
    counts = engine.stats()
    engine.update_params(other[0])
    found["updated"] = run(engine, {"updated": (PREFIX, GREEDY)})["updated"]
    return {
        "outputs": found,
        "num_swaps": counts.num_swaps,
        "num_compiled": counter.count,
        **held(engine),
    }


def held(engine: Engine) -> dict:
    """Bytes that each device holds of params and of pages; of one another's, none."""
    executor: Any = engine.executor
    return {
        "param_bytes": by_device(executor._params["layers"]),
        "embedding_bytes": by_device(executor._params["embed"]),
        "page_bytes": by_device(executor._kv_pages),
        "count_bytes": by_device(executor._sampler._counts),
    }


def by_device(tree: Any) -> list[int]:
    """Bytes by device, in their order."""
    sizes: dict[int, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            sizes[shard.device.id] = sizes.get(shard.device.id, 0) + shard.data.nbytes
    return [sizes[key] for key in sorted(sizes)]


def on_a_mesh_of_the_callers(given: Given) -> dict:
    """Axes of other names, one of them with nothing to cut; params that are where they belong."""
    config = given[1]
    devices = np.array(jax.devices()).reshape(1, 2, 2)
    mesh = jax.sharding.Mesh(devices, ("idle", "x", "y"))
    rules = AxisRules(heads="x", ffn=("x", "y"), vocab="y")
    engine = build(given, 2, mesh, axis_rules=rules, tensor_parallel_size=4)
    placed = engine.executor._params  # type: ignore[attr-defined]
    again = build(
        (unfilled(placed, config), config), 2, mesh, axis_rules=rules, tensor_parallel_size=1
    )
    kernels = [one.executor._params["layers"][0]["mlp"]["up"]["kernel"] for one in (engine, again)]  # type: ignore[attr-defined]
    return {
        "outputs": run(engine, FIRST),
        "again": run(again, FIRST),
        "are_shared": pointers(kernels[0]) == pointers(kernels[1]),
        **held(engine),
    }


def unfilled(params: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """With the vocabulary as the checkpoint has it."""
    embedding = params["embed"]["embedding"][: config.vocab_size]
    return {**params, "embed": {"embedding": embedding}}


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def on_one_other_device(given: Given) -> dict:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[3:]), ("anything",))
    engine = build(given, 1, mesh)
    outputs, executor = run(engine, FIRST), cast(Any, engine.executor)
    leaves = jax.tree.leaves((executor._params, executor._kv_pages, executor._sampler._counts))
    return {
        "outputs": outputs,
        "devices": sorted({device.id for leaf in leaves for device in leaf.devices()}),
    }


def from_other_devices(given: Given) -> list[dict]:
    """Without a mesh, params that their owner has bound to other devices, first and later."""
    params, config = given
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices[2:]), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    engine = build((jax.device_put(params, devices[3]), config), 1)
    found = [run(engine, FIRST)]
    engine.update_params(jax.device_put(params, everywhere))
    return [*found, run(engine, FIRST)]


def started_again(given: Given, keep: Mapping[str, Any]) -> dict:
    """An engine of two devices whose programs an earlier start has kept."""

    def files() -> list[str]:
        return sorted(path.name for path in (keep["compilation_cache_dir"] / "programs").iterdir())

    before = files()
    jax.clear_caches()  # as in a process of its own
    outputs = run(build(given, 2, **keep), FIRST)
    return {"outputs": outputs, "num_kept": len(before), "num_new": len(set(files()) - set(before))}


def refusals(given: Given) -> Iterator[str]:
    """What is said of what cannot be."""
    build_any: Any = build
    devices = np.array(jax.devices())
    flat = jax.sharding.Mesh(devices, ("model",))
    for size, mesh, options in (
        (8, None, {}),
        (3, None, {}),
        (2, flat, {}),
        (1, jax.sharding.Mesh(devices, ("tp",)), {}),
        (2, None, {"axis_rules": AxisRules(heads="x", ffn="y")}),
        (2, jax.sharding.Mesh(devices[:1], ("model",)), {}),
        (1, "model", {}),
    ):
        try:
            build_any(given, size, mesh, **options)
        except ConfigError as error:
            yield str(error)
        else:
            yield "served"


def main(folder: Path) -> dict:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    made = [make_random_llama(folder / str(seed), CONFIG, seed=seed) for seed in (0, 1)]
    given, other = (load_params(open_checkpoint(one), np.dtype(np.float32)) for one in made)
    keep: dict[str, Any] = {"compilation_cache_dir": folder / "kept"}
    found: dict[str, Any] = {}
    for size in (1, 4):
        found[str(size)] = all_work(build(given, size), other)
        found[f"int8 {size}"] = all_work(load(made[0], size, kv_cache_dtype="int8"), other)
    found["2"] = all_work(build(given, 2, **keep), other)
    found["kept"] = started_again(given, keep)
    found["mesh"] = on_a_mesh_of_the_callers(given)
    found["other device"] = on_one_other_device(given)
    found["from other devices"] = from_other_devices(given)
    found["refusals"] = list(refusals(given))
    return found


if __name__ == "__main__":
    assert jax.device_count() == 4, jax.devices()
    print(json.dumps(main(Path(sys.argv[1]))))
