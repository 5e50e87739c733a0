"""GPU programs with faults that the report must catch: scripts/gpu_aot fails where it does not.

Invariant: each stands for a mistake that a kernel or a model could really make.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

POOL = ((4, 2**26), "bfloat16")  # four layers of 128 MiB in one array
TILE = ((128, 512), "float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Control:
    """A program to compile.

    Args:
        function: of `arguments`; its kernel, if any, has its name.
        arguments: (shape, dtype) of each.
        donate: argument numbers that should be updated in place.
        caught: what must stand in the row's fault.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    donate: tuple[int, ...] = ()
    caught: tuple[str, ...]


def stacked_pools(pools: jax.Array, token: jax.Array):
    """One array for all layers' pools, which a scan takes apart and puts together again."""

    def layer(x, pool):
        return x + pool[:128], pool.at[:128].set(x)

    return jax.lax.scan(layer, token, pools)


def not_donated(pool: jax.Array):
    """A pool that the result cannot take the place of."""
    return pool.astype(jnp.float32).sum()


def whole_rows(x: jax.Array):
    """Plain vector arithmetic over a tile that no thread has the registers for."""

    def whole_rows(x, out, tile, loaded):
        plgpu.copy_gmem_to_smem(x, tile, loaded)
        plgpu.barrier_wait(loaded)
        value = plgpu.layout_cast(tile[...], plgpu.Layout.WGMMA)
        total = jax.lax.broadcast_in_dim(value.sum(axis=1), value.shape, [0])
        tile[...] = value * total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        whole_rows,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(1,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
    )(x)


CONTROLS = {
    "stacked pools are copied": Control(
        function=stacked_pools,
        arguments=(POOL, ((128,), "bfloat16")),
        donate=(0,),
        caught=("copies as large as the pool",),
    ),
    "a pool is not updated": Control(
        function=not_donated,
        arguments=(POOL,),
        donate=(0,),
        caught=("0 bytes updated in place",),
    ),
    "spills": Control(
        function=whole_rows,
        arguments=(((64, 512), "float32"),),
        caught=("bytes of spills", "registers, more than 64", "bytes of shared memory, more than"),
    ),
}
