"""Memory for packed weights."""

import gc
import re
import sys
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest

from pallas_kernels.native import huge_pages
from pallas_kernels.native.huge_pages import Arena


def test_arrays_are_zeros_aligned_and_apart():
    arena = Arena()
    arrays = [arena.zeros((size, 3), np.float32) for size in (1, 5, 100, 7)]
    for i, array in enumerate(arrays):
        assert array.shape[1:] == (3,)
        assert array.dtype == np.float32
        assert not array.any()
        assert array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous
        array += i + 1
    for i, array in enumerate(arrays):
        assert (array == i + 1).all()


def test_the_cpu_device_uses_them_in_place():
    array = Arena().zeros((1000,), np.float32)
    array += 1
    assert jax.device_put(array, jax.devices("cpu")[0]).unsafe_buffer_pointer() == array.ctypes.data


def test_an_array_larger_than_a_chunk_has_one_of_its_own(monkeypatch):
    monkeypatch.setattr(huge_pages, "_CHUNK", 1 << 16)
    arena = Arena()
    small = arena.zeros((10,), np.float32)
    large = arena.zeros((1 << 16,), np.float32)
    large += 1
    assert len(large) == 1 << 16
    assert not small.any()


def test_a_chunk_goes_with_the_last_of_its_arrays():
    arena = Arena()
    first, second = arena.zeros((10,), np.float32), arena.zeros((10,), np.float32)
    chunk = weakref.ref(arena._chunk)
    del arena, first
    gc.collect()
    second += 1
    assert chunk() is not None or second.base is not None
    memory = second
    while isinstance(memory, np.ndarray) and memory.base is not None:
        memory = memory.base
    del second, memory
    gc.collect()
    assert chunk() is None


def test_without_advice_of_the_system_arrays_are_aligned_all_the_same(monkeypatch):
    monkeypatch.delattr(huge_pages.mmap, "MADV_HUGEPAGE", raising=False)
    array = Arena().zeros((100,), np.float32)
    assert array.ctypes.data % 64 == 0
    assert not array.any()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_touched_memory_lies_in_huge_pages_where_there_are_some():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system has no huge pages for applications")
    array = Arena().zeros((4 << 20,), np.float32)
    array += 1
    begin = array.ctypes.data
    mapping = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            mapping = [int(number, 16) for number in match.groups()]
        elif line.startswith("VmFlags:") and mapping[0] <= begin < mapping[1]:
            assert " hg" in line  # asked for; how many there are is the system's to say
            return
    raise AssertionError("the array lies in no mapping")
