"""The pools of KV pages of an executor, and the table that penalties read, made by programs of its
table.

Used by `DeviceExecutor` when it starts and when it is reset. Invariant: they hold zeros. On a CPU with
the C++ kernels they take memory only where pages are used; elsewhere XLA writes them.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.device.placement import Placement
from jaxserve.device.programs import Program, ProgramTable
from jaxserve.device.step_shapes import StepShapes
from pallas_kernels.native import load
from pallas_kernels.native.lazy_zeros import lazy_zeros
from pallas_kernels.ragged_paged_attention.layout import KVPages

_KEY = ("make_pages", 0)
_COUNTS_KEY = ("make_counts", 0)


def pool_program(shapes: StepShapes) -> Program:
    """What must be compiled: the arrays of one layer's pool."""
    shape = shapes.abstract_pages()[0]
    make = functools.partial(_arrays, _zeros(shapes.placement), shape)
    return shapes.program(_KEY, make, (), results=shapes.pages_spec)


def count_table_program(shapes: StepShapes) -> Program:
    """What must be compiled: the table that penalties read, which most engines never write to."""
    table = shapes.abstract_counts
    make = functools.partial(_zeros(shapes.placement), table.shape, table.dtype)
    return shapes.program(_COUNTS_KEY, make, (), results=shapes.placement.logits)


def _zeros(placement: Placement) -> Callable[..., jax.Array]:
    """How to make an array of zeros. The C++ call makes whole ones: not for devices that share it."""
    lazy = placement.platform == "cpu" and load.missing() is None and not placement.is_shared
    return lazy_zeros if lazy else jnp.zeros


def make_pools(shapes: StepShapes, programs: ProgramTable) -> list[KVPages]:
    """A pool of zeros for every layer.

    Args:
        shapes: of the engine.
        programs: a table that holds `pool_program(shapes)`.
    """
    make = programs[_KEY]
    return [dataclasses.replace(one, data=tuple(make())) for one in shapes.abstract_pages()]


def make_count_table(programs: ProgramTable) -> jax.Array:
    """i32[S, V] of zeros.

    Args:
        programs: a table that holds `count_table_program(shapes)`.
    """
    return programs[_COUNTS_KEY]()


def _arrays(make, shape: KVPages) -> list[jax.Array]:
    return [make(array.shape, array.dtype) for array in shape.data]
