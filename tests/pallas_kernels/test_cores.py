"""A thread leaves the core that it is told to leave, and may run where it might before."""

import ctypes
import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from pallas_kernels.dense.cpu import dense, pack
from pallas_kernels.native import load
from pallas_kernels.native.cores import step_aside

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="cores are known on Linux only"),
    pytest.mark.skipif(load.missing() is not None, reason="there are no C++ kernels here"),
]
needs_two = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="there is one core",
)
NUM_TRIES = 20  # now and then the system moves a thread of its own accord


def own_core() -> int:
    return ctypes.CDLL(None).sched_getcpu()


def in_a_thread(function):
    """Where a thread may run is its own; that of the tests stays as it is."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(function, *args, **kwargs).result()

    return run


def num_moves(leave) -> int:
    """How often, of NUM_TRIES, the thread is on another core after `leave(core)`."""
    allowed, moves = os.sched_getaffinity(0), 0
    for _ in range(NUM_TRIES):
        core = own_core()
        leave(core)
        moves += own_core() != core
        assert os.sched_getaffinity(0) == allowed
    return moves


@needs_two
@in_a_thread
def test_a_thread_leaves_its_core():
    assert num_moves(load.register().jaxserve_leave_core) > NUM_TRIES / 2


@needs_two
@pytest.mark.parametrize("other", [lambda core: core + 1, lambda core: -1, lambda core: 10**6])
@in_a_thread
def test_it_stays_where_another_core_is_meant(other):
    leave = load.register().jaxserve_leave_core
    assert num_moves(lambda core: leave(other(core))) < NUM_TRIES / 2


@in_a_thread
def test_it_stays_where_it_may_run_on_one_core_only():
    os.sched_setaffinity(0, {own_core()})
    assert num_moves(load.register().jaxserve_leave_core) == 0


@needs_two
@in_a_thread
def test_it_steps_aside_from_the_core_that_kernels_were_last_called_on():
    allowed, library = os.sched_getaffinity(0), load.register()
    x = np.ones((1, 64), np.float32)
    call = jax.jit(dense, static_argnums=2)
    jax.block_until_ready(call(x, pack([np.ones((64, 64), np.float32)]), 64))
    called_on = library.jaxserve_caller_core()
    assert called_on in allowed
    moves = 0
    for _ in range(NUM_TRIES):
        os.sched_setaffinity(0, {called_on})
        os.sched_setaffinity(0, allowed)
        step_aside()
        moves += own_core() != called_on
    assert moves > NUM_TRIES / 2


def test_no_library_is_looked_for_where_none_is_used(monkeypatch):
    monkeypatch.setattr(load, "register", functools.cache(lambda: pytest.fail("it was looked for")))
    step_aside()
