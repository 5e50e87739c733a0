"""The engine's own programs of T tokens and of R rows, for large models, compiled for a target.

Used by the workers. One row a step: the device holds params and pages once and, while a program runs,
its temporaries, so HBM is the sum of the first and the most of the second. Invariant: the programs are
those that `StepShapes` gives the executor, placed by `model.sharding`; nothing is written again here.
"""

import collections
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxserve.device.programs import Program
from jaxserve.device.step_shapes import StepShapes
from jaxserve.model import sharding
from jaxserve.model.attention import AttentionKernel
from jaxserve.model.registry import ModelFunctions, build_model
from jaxserve.model_config import ModelConfig
from jaxserve.schedule.buckets import Buckets
from pallas_kernels import dispatch
from pallas_kernels.page_bytes import page_bytes
from scripts.aot.target import AXIS, REFUSALS, Target, collectives, local_bytes, look_at, refusal
from scripts.models import LLAMA_3_8B, LLAMA_3_70B

DTYPE = jnp.dtype("bfloat16")
MODELS = {"llama-3-8b": LLAMA_3_8B, "llama-3-70b": LLAMA_3_70B}
# 256 sequences of up to 8192 tokens, 512 tokens in a step, every sequence sampled.
BUCKETS = Buckets(max_num_seqs=256, max_num_batched_tokens=512, tokens=(512,), rows=(256,))
MAX_MODEL_LEN = 8192
# Of each layer on each device: more than the 128 MiB that XLA might prefetch into VMEM whole.
POOL_BYTES = 160 * 2**20
# Left for temporaries where the depth is chosen by what fits.
SPARE_BYTES = 2 * 2**30


def step_shapes(config: ModelConfig, backend: str, target: Target) -> StepShapes:
    """What the executor would compile for a model shared by the target's devices."""
    sharding.check_model(config, target.num_devices)
    mesh = target.context if target.num_devices > 1 else None
    model = build_model(config, DTYPE, AttentionKernel(backend=backend, mesh=mesh, axis=AXIS))
    page_size = dispatch.pick_page_size(
        backend, max_num_seqs=BUCKETS.max_num_seqs, max_model_len=MAX_MODEL_LEN
    )
    layout = dispatch.layout_of(backend)
    one_page = page_bytes(
        layout, page_size, config.num_kv_heads // target.num_devices, config.head_dim, DTYPE.name
    )
    return StepShapes(
        model=model,
        buckets=BUCKETS,
        num_pages=POOL_BYTES // one_page + 1,
        page_size=page_size,
        max_pages=MAX_MODEL_LEN // page_size,
        layout=layout,
        dtype=DTYPE,
        kv_dtype=DTYPE,
        layers_per_program=config.num_layers,
    )


def argument_specs(program: Program, model: ModelFunctions, layout: str) -> tuple:
    """How the arguments of one of the engine's programs are cut."""
    params = sharding.param_specs(model.abstract_params, AXIS)
    pages = [sharding.pages_spec(layout, AXIS)] * model.config.num_layers
    return {
        "embed": (params["embed"], P(), P()),
        "layers": (model.layer_params(params), pages, P(), P(), P(), P(AXIS)),
        "select": (P(), P(), P()),
        # The head leaves each device the logits of its own tokens.
        "head": (model.head_params(params), P()),
        "process": (P(None, AXIS), P(None, AXIS), P(), P(), P()),
        "sample": (P(None, AXIS), P(None, AXIS), P()),
        "count": (P(None, AXIS), P(), P()),
        "load_counts": (P(None, AXIS), P(), P(), P(), P()),
        "candidates": (P(None, AXIS), P(None, AXIS), P()),
        "gather_scored": (P(), P()),
        "score": (model.head_params(params), P(), P()),
        "score_top": (model.head_params(params), P(), P()),
    }[program.key[0]]


def layer_bytes(shapes: StepShapes, target: Target) -> tuple[int, int]:
    """Bytes that one device holds: (of one layer, params and pages; of embedding, norm and head)."""
    params = target.place(
        shapes.model.abstract_params, sharding.param_specs(shapes.model.abstract_params, AXIS)
    )
    pages = target.place(shapes.abstract_pages()[0], sharding.pages_spec(shapes.layout, AXIS))
    layers = params.pop("layers")
    return local_bytes((layers[0], pages)), local_bytes(params)


def pick_depth(name: str, layers: str, backend: str, target: Target, hbm_bytes: int) -> int:
    """Layers to compile.

    Args:
        name: of the model.
        layers: a number, or "all" for as many as the model has and HBM holds.
        backend: of attention.
        target: the devices.
        hbm_bytes: of each.
    """
    config = MODELS[name]
    if layers != "all":
        return min(int(layers), config.num_layers)
    one, rest = layer_bytes(step_shapes(config, backend, target), target)
    return min(config.num_layers, (hbm_bytes - SPARE_BYTES - rest) // one)


def row_name(name: str, depth: int, target: Target) -> str:
    """What a row is called: the model, how many of its layers, how many devices share it."""
    shared = f" tp{target.num_devices}" if target.num_devices > 1 else ""
    return f"{name} {depth} of {MODELS[name].num_layers} layers{shared}"


def compile_step(
    name: str,
    depth: int,
    backend: str,
    target: Target,
    *,
    look: Callable[[jax.stages.Compiled], None] = lambda compiled: None,
) -> dict:
    """One row of the report.

    Args:
        name: of the model.
        depth: layers to compile.
        backend: of attention.
        target: the devices.
        look: is shown each compiled program.

    Returns:
        Bytes of each device; "full_gib" is "hbm_mib" with params and pages of the missing layers
        added, which a program of full depth holds besides; "collectives" by program.
    """
    shapes = step_shapes(dataclasses.replace(MODELS[name], num_layers=depth), backend, target)
    one, rest = layer_bytes(shapes, target)
    faults, exchanged = [], {}
    seconds = most = temp = code = 0.0
    for program in shapes.programs():
        kind = program.key[0]
        specs = argument_specs(program, shapes.model, shapes.layout)
        arguments = target.place(program.arguments, specs)
        donated = [arguments[i] for i in program.donated]
        pools = arguments[1][0].data if kind == "layers" else ()
        try:
            compiled, spent = target.compile(program.function, *arguments, donate=program.donated)
        except REFUSALS as error:
            return {"fault": f"{kind}: {refusal(error)}"}
        look(compiled)
        found = look_at(compiled, donated, pools)
        exchanged[kind] = collectives(compiled)
        beyond = found["hbm_mib"] - local_bytes(arguments) / 2**20
        seconds, code = seconds + spent, code + found["code_kib"]
        most, temp = max(most, beyond), max(temp, found["temp_mib"])
        faults += [f"{kind}: {found['fault']}"] * bool(found["fault"])
    faults += exchange_faults(exchanged, depth, target.num_devices)
    hbm_mib = (depth * one + rest) / 2**20 + most
    missing = MODELS[name].num_layers - depth
    return {
        "hbm_mib": hbm_mib,
        "full_gib": (hbm_mib + missing * one / 2**20) / 2**10,
        "temp_mib": temp,
        "code_kib": code,
        "compile_s": seconds,
        "collectives": describe(exchanged),
        "fault": "; ".join(faults),
    }


def exchange_faults(
    exchanged: dict[str, collections.Counter[str]], depth: int, num_devices: int
) -> list[str]:
    """What is wrong with what the devices exchange: two all-reduces a layer, nothing else there."""
    wanted = {"all-reduce": 2 * depth} if num_devices > 1 else {}
    if exchanged["layers"] == wanted:
        return []
    return [f"layers: {dict(exchanged['layers'])} exchanged, not {wanted}"]


def describe(exchanged: dict[str, collections.Counter[str]]) -> str:
    """Exchanges by program, such as "layers 4 all-reduce, sample 2 all-gather"; "none"."""
    parts = [
        f"{program} {count} {kind}"
        for program, counts in exchanged.items()
        for kind, count in counts.items()
    ]
    return ", ".join(parts) or "none"
