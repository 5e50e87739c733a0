"""Pools of pages begin as zeros, and on CPU take memory only where they are used."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.kv_pool import make_pools, pool_program
from jaxserve.device.programs import ProgramTable
from pallas_kernels.native import load
from pallas_kernels.native.lazy_zeros import lazy_zeros
from tests.device.executors import shared_pages

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
needs_native = pytest.mark.skipif(
    load.missing() is not None, reason="the C++ kernels are not built"
)


@pytest.mark.parametrize("native", [True, False])
def test_every_layer_has_a_pool_of_zeros_of_its_own(monkeypatch, native):
    if not native:
        monkeypatch.setattr(load, "missing", lambda: "nothing was built")
    shapes = shared_pages("auto")._shapes
    table = ProgramTable()
    program = pool_program(shapes)
    table.compile_all([program])
    assert ("lazy_zeros" in table[program.key].as_text()) == (native and load.missing() is None)
    pools = make_pools(shapes, table)
    assert jax.tree.structure(pools) == jax.tree.structure(shapes.abstract_pages())
    leaves = jax.tree.leaves(pools)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    for leaf in leaves:
        np.testing.assert_array_equal(leaf, np.zeros(leaf.shape, leaf.dtype))


@needs_native
@pytest.mark.parametrize("shape", [(3,), (1000, 1001), (0,), (PAGE_BYTES // 4,)])
def test_zeros_where_other_values_were(shape):
    """Freed memory comes back: it is given up, and its ends are written."""
    make = jax.jit(lambda: lazy_zeros(shape, jnp.float32))
    for _ in range(3):
        full = [make() + 1 for _ in range(4)]
        jax.block_until_ready(full)
        del full
        for zeros in [make() for _ in range(4)]:
            np.testing.assert_array_equal(zeros, np.zeros(shape, np.float32))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


@needs_native
def test_memory_is_taken_where_it_is_written():
    num_bytes = 2**28
    make = jax.jit(lambda: lazy_zeros((num_bytes // 4,), jnp.float32)).lower().compile()
    begin = resident_bytes()
    zeros = jax.block_until_ready(make())
    assert resident_bytes() - begin < num_bytes // 8
    ones = jax.block_until_ready(zeros + 1)  # the control: what is written is there
    assert resident_bytes() - begin > num_bytes // 2
    del ones
