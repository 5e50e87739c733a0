"""A process of its own that compiles an engine's step for TPUs that are not there: `jaxserve plan --aot`.

Started by `cli/plan_aot.py` as `python -m jaxserve.device.aot_worker`, with what libtpu wants to be told in
its environment. Reads one JSON object from standard input and writes one to standard output. Invariant:
nothing here needs a TPU; jax's own backend is the CPU.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.experimental import topologies

from jaxserve.device import aot
from jaxserve.device.aot_target import Target
from jaxserve.model_config import ModelConfig, RopeConfig
from jaxserve.schedule.buckets import Buckets


def config_from(values: Mapping[str, Any]) -> ModelConfig:
    """A config from its fields as JSON has them: lists for tuples, an object for the rope.

    Args:
        values: of `dataclasses.asdict(config)`.
    """
    lists = {name: _tuples(value) for name, value in values.items() if name != "rope"}
    rope = {name: _tuples(value) for name, value in values["rope"].items()}
    return ModelConfig(**lists, rope=RopeConfig(**rope))


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def compile_for(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles a step.

    Args:
        asked: topology (name of one that libtpu knows, with at least num_chips), num_chips, config
            (fields of a `ModelConfig`), num_layers (how many to compile; the others' bytes are added),
            backend, max_num_seqs, max_num_batched_tokens, max_model_len, page_size, num_pages, dtype and
            kv_dtype.

    Returns:
        hbm_bytes, resident_bytes, step_bytes, temp_bytes, code_bytes of one chip, with all layers;
        compile_s, collectives, num_layers, fault.
    """
    devices = topologies.get_topology_desc(platform="tpu", topology_name=asked["topology"]).devices[
        : asked["num_chips"]
    ]
    target = Target(devices, "tpu", getattr(devices[0], "num_cores", 1))
    config = config_from(asked["config"])
    depth = min(asked["num_layers"], config.num_layers)
    tokens, seqs = asked["max_num_batched_tokens"], asked["max_num_seqs"]
    shapes = aot.step_shapes(
        aot.first_layers(config, depth),
        target,
        backend=asked["backend"],
        buckets=Buckets(
            max_num_seqs=seqs, max_num_batched_tokens=tokens, tokens=(tokens,), rows=(seqs,)
        ),
        max_model_len=asked["max_model_len"],
        page_size=asked["page_size"],
        num_pages=asked["num_pages"],
        dtype=jnp.dtype(asked["dtype"]),
        kv_dtype=jnp.dtype(asked["kv_dtype"]),
    )
    step = aot.compile_step(shapes, target)
    missing = (config.num_layers - depth) * step.layer_bytes
    return {
        "hbm_bytes": step.hbm_bytes + missing if step.hbm_bytes else None,
        "resident_bytes": step.resident_bytes + missing,
        "step_bytes": step.step_bytes,
        "temp_bytes": step.temp_bytes,
        "code_bytes": step.code_bytes,
        "compile_s": step.compile_s,
        "collectives": aot.describe(step.collectives),
        "num_layers": depth,
        "fault": step.fault,
    }


def main() -> None:
    """Answers the object on standard input; ends with 1 and a line on stderr where it cannot."""
    print(json.dumps(compile_for(json.load(sys.stdin))), flush=True)


if __name__ == "__main__":
    main()
