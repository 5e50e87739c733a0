"""The pools of KV pages of an executor, made by a program of its table: one call a layer.

Used by `DeviceExecutor` when it starts and when it is reset. Invariant: pools hold zeros. On a CPU with
the C++ kernels they take memory only where pages are used; elsewhere XLA writes them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxserve.device.programs import Program, ProgramTable
from jaxserve.device.step_shapes import StepShapes
from pallas_kernels.native import load
from pallas_kernels.native.lazy_zeros import lazy_zeros
from pallas_kernels.ragged_paged_attention.layout import KVPages

_KEY = ("make_pages", 0)


def pool_program(shapes: StepShapes) -> Program:
    """What must be compiled: the arrays of one layer's pool."""
    shape = shapes.abstract_pages()[0]
    lazy = jax.default_backend() == "cpu" and load.missing() is None
    make = lazy_zeros if lazy else jnp.zeros
    return Program(key=_KEY, function=functools.partial(_arrays, make, shape), arguments=())


def make_pools(shapes: StepShapes, programs: ProgramTable) -> list[KVPages]:
    """A pool of zeros for every layer.

    Args:
        shapes: of the engine.
        programs: a table that holds `pool_program(shapes)`.
    """
    make = programs[_KEY]
    return [dataclasses.replace(one, data=tuple(make())) for one in shapes.abstract_pages()]


def _arrays(make, shape: KVPages) -> list[jax.Array]:
    return [make(array.shape, array.dtype) for array in shape.data]
