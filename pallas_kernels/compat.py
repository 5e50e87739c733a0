"""Every name of Pallas that this package uses, in one place.

Called by the kernels and their tests. Invariant: no other module imports from `jax.experimental`
or `jax._src`, so that when a release moves a name, only this file changes (jax 0.11.2 to 0.12).
"""

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# `io_callback` calls the host from inside a program.

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


__all__ = [
    "ANY",
    "VMEM",
    "BlockSpec",
    "DmaSemaphore",
    "TpuCompilerParams",
    "TpuGridSpec",
    "TpuInterpretParams",
    "bitcast",
    "ds",
    "io_callback",
    "make_async_copy",
    "pallas_call",
    "reset_tpu_interpreter",
    "tpu_races_found",
    "when",
]
