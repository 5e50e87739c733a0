"""Every name of Pallas that this package uses, in one place.

Called by the kernels and their tests. Invariant: no other module imports from `jax.experimental`
or `jax._src`, so that when a release moves a name, only this file changes (jax 0.11.2 to 0.12).
"""

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

# A Mosaic GPU kernel: the program, where it reads and writes, what it does.
gpu_kernel = plgpu.kernel
GpuCompilerParams = plgpu.CompilerParams
SMEM = plgpu.SMEM
Barrier = plgpu.Barrier
GpuLayout = plgpu.Layout
SwizzleTransform = plgpu.SwizzleTransform
TilingTransform = plgpu.TilingTransform
WgmmaAccumulator = plgpu.ACC
barrier_arrive = plgpu.barrier_arrive
barrier_wait = plgpu.barrier_wait
commit_smem = plgpu.commit_smem
copy_gmem_to_smem = plgpu.copy_gmem_to_smem
copy_smem_to_gmem = plgpu.copy_smem_to_gmem
gpu_iota = plgpu.broadcasted_iota
layout_cast = plgpu.layout_cast
run_scoped = pl.run_scoped
set_max_registers = plgpu.set_max_registers
wait_smem_to_gmem = plgpu.wait_smem_to_gmem
wgmma = plgpu.wgmma

# Running a GPU kernel on a CPU.
GpuInterpretParams = plgpu.InterpretGPUParams
reset_gpu_interpreter = gpu_callbacks.reset_gpu_interpret_mode_state

# Running a TPU kernel on a CPU.
TpuInterpretParams = pltpu.InterpretParams
reset_tpu_interpreter = pltpu.reset_tpu_interpret_mode_state


def tpu_races_found() -> bool:
    """Whether the last interpreted kernel had a race. jax 0.11 only records it; 0.12 also raises."""
    races = interpret_pallas_call.races
    return races is not None and races.races_found


def gpu_races_found() -> bool:
    """As `tpu_races_found`, for the GPU interpreter."""
    races = gpu_callbacks._races
    return races is not None and races.races_found


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
    "layout_cast",
    "make_async_copy",
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
