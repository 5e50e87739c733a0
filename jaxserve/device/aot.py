"""The engine's own programs of T tokens and of R rows, compiled for devices that are not there.

Used by `jaxserve plan --aot` (`aot_worker`) and by the scripts that compile for TPUs and GPUs. The device
holds params, pages and the table of penalties once and, while a program runs, what that program takes
besides; so HBM is the sum of the first and the most of the second. Invariant: the programs are those that
`StepShapes` gives the executor, placed as it says; nothing is written again here.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxserve.config import AxisRules
from jaxserve.device.aot_target import (
    AXIS,
    REFUSALS,
    Target,
    collectives,
    local_bytes,
    look_at,
    refusal,
)
from jaxserve.device.placement import Placement
from jaxserve.device.step_shapes import StepShapes
from jaxserve.model import sharding
from jaxserve.model.attention import AttentionKernel
from jaxserve.model.registry import build_model
from jaxserve.model_config import ModelConfig
from jaxserve.schedule.buckets import Buckets
from pallas_kernels import dispatch

# Arguments that stay on the device from step to step, by program: params, pages, scales, penalties.
_RESIDENT = {
    "embed": (0,),
    "layers": (0, 1, 5),
    "head": (0,),
    "process": (1,),
    "count": (0,),
    "load_counts": (0,),
    "score": (0,),
    "score_top": (0,),
}
_HOLDERS = ("layers", "embed", "head")  # they take every param and every page between them


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """What the compiler made of a step; bytes are those of one device.

    Args:
        resident_bytes: params, pages, scales and the table of penalties, as compiled: padding included.
        step_bytes: the most that a program takes beyond them: other arguments, results, temporaries.
        layer_bytes: params and pages of one layer.
        temp_bytes: the most temporaries of a program.
        code_bytes: of all programs.
        compile_s: seconds.
        collectives: exchanges by program and kind.
        fault: what is wrong; "" where all is well.
    """

    resident_bytes: int = 0
    step_bytes: int = 0
    layer_bytes: int = 0
    temp_bytes: int = 0
    code_bytes: int = 0
    compile_s: float = 0.0
    collectives: Mapping[str, collections.Counter[str]] = dataclasses.field(default_factory=dict)
    fault: str = ""

    @property
    def hbm_bytes(self) -> int:
        """What a device needs."""
        return self.resident_bytes + self.step_bytes


def shared_config(config: ModelConfig, num_devices: int) -> ModelConfig:
    """The config by which several devices share a model: with fewer kv heads than devices each head is
    held by several of them, which is a model with as many kv heads as devices.

    Raises:
        ValueError: they cannot share it.
    """
    return sharding.shared_config(config, sharding.Shares.even(num_devices))


def first_layers(config: ModelConfig, depth: int) -> ModelConfig:
    """A model of the first `depth` layers of another."""
    windows, turned = config.layer_windows, config.rope_layers
    return dataclasses.replace(
        config,
        num_layers=depth,
        layer_windows=None if windows is None else windows[:depth],
        rope_layers=None if turned is None else turned[:depth],
    )


def step_shapes(
    config: ModelConfig,
    target: Target,
    *,
    backend: str,
    buckets: Buckets,
    max_model_len: int,
    page_size: int,
    num_pages: int,
    dtype: jnp.dtype,
    kv_dtype: jnp.dtype,
) -> StepShapes:
    """What the executor would compile for a model shared by the target's devices, all layers as one
    program.

    Args:
        config: the model.
        target: the devices.
        backend: of attention.
        buckets: the ladders.
        max_model_len: longest context in tokens.
        page_size: tokens a page.
        num_pages: of the pool, the null page included.
        dtype: of weights and activations.
        kv_dtype: of pages.

    Raises:
        ValueError: the devices cannot share the model.
    """
    mesh = target.context if target.num_devices > 1 else None
    kernel = AttentionKernel(backend=backend, mesh=mesh, axis=AXIS)
    shares = sharding.Shares.even(target.num_devices)
    return StepShapes(
        model=build_model(config, dtype, kernel, shares),
        buckets=buckets,
        num_pages=num_pages,
        page_size=page_size,
        max_pages=-(-max_model_len // page_size),
        layout=dispatch.layout_of(backend),
        dtype=dtype,
        kv_dtype=kv_dtype,
        layers_per_program=config.num_layers,
        num_token_ids=config.vocab_size,
        placement=Placement(mesh=target.mesh, rules=AxisRules.over(AXIS)),
    )


def layer_bytes(shapes: StepShapes) -> tuple[int, int]:
    """Bytes that one device holds: (of one layer, params and pages; of embedding, norm and head)."""
    params = dict(shapes.served_params)
    layers = params.pop("layers")
    return local_bytes((layers[0], shapes.abstract_pages()[0])), local_bytes(params)


def compile_step(
    shapes: StepShapes,
    target: Target,
    *,
    look: Callable[[jax.stages.Compiled], None] = lambda compiled: None,
) -> CompiledStep:
    """Compiles every program of the ladders.

    Args:
        shapes: of the engine.
        target: the devices.
        look: is shown each compiled program.

    Returns:
        What was found; a program that is refused ends it, and is the fault.
    """
    one, rest = layer_bytes(shapes)
    resident = shapes.model.config.num_layers * one + rest
    resident += local_bytes((shapes.abstract_counts, shapes.abstract_scales()))
    most = temp = code = 0
    seconds, faults, exchanged = 0.0, [], {}
    for program in shapes.programs():
        kind = program.key[0]
        arguments = program.arguments
        pools = arguments[1][0].data if kind == "layers" else ()
        donated = [arguments[i] for i in program.donated]
        try:
            compiled, spent = target.compile(
                program.function,
                *arguments,
                donate=program.donated,
                out_shardings=program.out_shardings,
            )
        except REFUSALS as error:
            return CompiledStep(layer_bytes=one, fault=f"{kind}: {refusal(error)}")
        look(compiled)
        found, memory = look_at(compiled, donated, pools), compiled.memory_analysis()
        assert memory is not None, "no memory analysis of absent devices on this platform"
        exchanged[kind] = collectives(compiled)
        held = local_bytes([arguments[i] for i in _RESIDENT.get(kind, ())])
        padding = memory.argument_size_in_bytes - local_bytes(arguments)
        resident += padding if kind in _HOLDERS else 0
        beyond = round(found["hbm_mib"] * 2**20) - held - (padding if kind in _HOLDERS else 0)
        seconds, code = seconds + spent, code + memory.generated_code_size_in_bytes
        most, temp = max(most, beyond), max(temp, memory.temp_size_in_bytes)
        faults += [f"{kind}: {found['fault']}"] * bool(found["fault"])
    faults += exchange_faults(exchanged, shapes.model.config.num_layers, target.num_devices)
    return CompiledStep(
        resident_bytes=resident,
        step_bytes=most,
        layer_bytes=one,
        temp_bytes=temp,
        code_bytes=code,
        compile_s=seconds,
        collectives=exchanged,
        fault="; ".join(faults),
    )


def exchange_faults(
    exchanged: Mapping[str, collections.Counter[str]], depth: int, num_devices: int
) -> list[str]:
    """What is wrong with what the devices exchange: two all-reduces a layer, nothing else there."""
    wanted = {"all-reduce": 2 * depth} if num_devices > 1 else {}
    if exchanged["layers"] == wanted:
        return []
    return [f"layers: {dict(exchanged['layers'])} exchanged, not {wanted}"]


def describe(exchanged: Mapping[str, collections.Counter[str]]) -> str:
    """Exchanges by program, such as "layers 4 all-reduce, sample 2 all-gather"; "none"."""
    parts = [
        f"{program} {count} {kind}"
        for program, counts in exchanged.items()
        for kind, count in counts.items()
    ]
    return ", ".join(parts) or "none"
