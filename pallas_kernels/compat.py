"""Every name of Pallas that this package uses, in one place.

Called by the kernels and their tests. Invariant: no other module imports from `jax.experimental`
or `jax._src`, so that when a release moves a name, only this file changes (jax 0.11.2 to 0.12).
"""

from typing import Any

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

# The program of a kernel, and where it reads and writes.
pallas_call = pl.pallas_call
BlockSpec = pl.BlockSpec
TpuGridSpec = pltpu.PrefetchScalarGridSpec
TpuCompilerParams = pltpu.CompilerParams
ANY = pl.ANY
VMEM = pltpu.VMEM
DmaSemaphore = pltpu.SemaphoreType.DMA

# Inside a kernel.
ds = pl.ds
when = pl.when
make_async_copy = pltpu.make_async_copy
bitcast = pltpu.bitcast

# Running a TPU kernel on a CPU.
TpuInterpretParams = pltpu.InterpretParams
reset_tpu_interpreter = pltpu.reset_tpu_interpret_mode_state


def tpu_races_found() -> bool:
    """Whether the last interpreted kernel had a race. jax 0.11 only records it; 0.12 also raises."""
    races = interpret_pallas_call.races
    return races is not None and races.races_found


# The program of a Hopper kernel, and where it reads and writes.
gpu_kernel = plgpu.kernel
GpuCompilerParams = plgpu.CompilerParams
Barrier = plgpu.Barrier
SMEM = plgpu.SMEM
WgmmaAccumulator = plgpu.ACC
GpuLayout = plgpu.Layout
TilingTransform = plgpu.TilingTransform
SwizzleTransform = plgpu.SwizzleTransform

# Inside a Hopper kernel.
loop = pl.loop
multiple_of = pl.multiple_of
run_scoped = pl.run_scoped
barrier_arrive = plgpu.barrier_arrive
barrier_wait = plgpu.barrier_wait
commit_smem = plgpu.commit_smem
copy_gmem_to_smem = plgpu.copy_gmem_to_smem
copy_smem_to_gmem = plgpu.copy_smem_to_gmem
gpu_iota = plgpu.broadcasted_iota
layout_cast = plgpu.layout_cast
set_max_registers = plgpu.set_max_registers
wait_smem_to_gmem = plgpu.wait_smem_to_gmem
wgmma = plgpu.wgmma

# Running a Hopper kernel on a CPU.
GpuInterpretParams = plgpu.InterpretGPUParams
reset_gpu_interpreter = gpu_callbacks.reset_gpu_interpret_mode_state


def gpu_races_found() -> bool:
    """Whether the last interpreted kernel had a race. jax 0.11 only records it; 0.12 also raises."""
    races = gpu_callbacks._races
    return races is not None and races.races_found


def interpreter(interpret: object, parameters: type) -> Any:
    """What a kernel call takes as `interpret`.

    Args:
        interpret: None or False for the device, True for the interpreter that simulates it, or that
            interpreter's parameters.
        parameters: their class, TpuInterpretParams or GpuInterpretParams.

    Raises:
        ValueError: anything else.
    """
    if interpret is None or interpret is False:
        return False
    if interpret is True:
        return parameters()
    if isinstance(interpret, parameters):
        return interpret
    raise ValueError(
        f"interpret={interpret!r}: expected None, True, False or {parameters.__name__}"
    )


__all__ = [
    "ANY",
    "SMEM",
    "VMEM",
    "Barrier",
    "BlockSpec",
    "DmaSemaphore",
    "GpuCompilerParams",
    "GpuInterpretParams",
    "GpuLayout",
    "SwizzleTransform",
    "TilingTransform",
    "TpuCompilerParams",
    "TpuGridSpec",
    "TpuInterpretParams",
    "WgmmaAccumulator",
    "barrier_arrive",
    "barrier_wait",
    "bitcast",
    "commit_smem",
    "copy_gmem_to_smem",
    "copy_smem_to_gmem",
    "ds",
    "gpu_iota",
    "gpu_kernel",
    "gpu_races_found",
    "interpreter",
    "layout_cast",
    "loop",
    "make_async_copy",
    "multiple_of",
    "pallas_call",
    "reset_gpu_interpreter",
    "reset_tpu_interpreter",
    "run_scoped",
    "set_max_registers",
    "tpu_races_found",
    "wait_smem_to_gmem",
    "wgmma",
    "when",
]
