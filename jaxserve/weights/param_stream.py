"""The parameters of a checkpoint on their way to wherever they are wanted, a few tensors at a time.

Made by `load_model` and `loader.load_params`; taken by `build`, which says where each one goes. Reading
begins at once, in threads, before anybody can say so: modules are imported and programs are chosen
meanwhile.

    file --[block of rows]--> threads --[array]--> take(place) --> tree of what `place` returns

Invariant: with `bounded`, what is read and not yet placed takes at most twice the largest parameter (and
a block for each thread), whatever the size of the model. Without, it is kept: so where it is used in
place, as a CPU device uses host memory.
"""

import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.model_config import ModelConfig
from jaxserve.weights.checkpoint import Checkpoint, ParamSource, TensorInfo
from jaxserve.weights.name_maps import ParamSpec

# (path in the params tree, array in host memory) -> what the tree shall hold. Once it returns, the array
# may be gone: it waits until the device has it.
Place = Callable[[tuple[str | int, ...], np.ndarray], Any]
# path -> the jax sharding of that parameter, or None where `place` is to be called.
ShardingOf = Callable[[tuple[str | int, ...]], Any]

_MAX_READERS = 8  # threads, each with a parameter and a block of it
_BLOCK_BYTES = 2 << 20  # of f32: what is read, or dequantised, at a time
_ALIGNMENT = 64  # bytes; XLA uses a buffer of the host in place where it begins at a multiple
# From this size on memory comes from the system, page by page, and goes back to it once it is dropped; an
# allocator would keep it for others of its own thread.
_MAPPED_BYTES = 1 << 20


class ParamStream:
    """The parameters of one checkpoint, to be taken once.

    Args:
        checkpoint: from `open_checkpoint`.
        config: from `loader.check_tensors`, which found every tensor.
        dtype: floating dtype of the result, anything numpy takes as a dtype.
        bounded: do not read on while twice the largest parameter lies unplaced.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, dtype: Any, *, bounded: bool = False
    ):
        specs = checkpoint.param_specs(config)
        self._queue = _Queue(checkpoint, specs, np.dtype(dtype), bounded=bounded)
        self._taken = False
        # Threads that wait for room end with the stream that nobody takes.
        weakref.finalize(self, self._queue.close)
        # What can be read onto devices by parts waits for whoever knows of them.
        self._waits = bounded and checkpoint.holds_params
        if not self._waits:
            self._start()

    def _start(self) -> None:
        for number in range(min(_MAX_READERS, os.cpu_count() or 1)):
            name = f"weights-{number}"
            # They end with the process: whoever stops a start does not wait for the weights.
            threading.Thread(target=self._queue.read_all, name=name, daemon=True).start()

    def take(
        self, place: Place | None = None, sharding_of: ShardingOf | None = None
    ) -> dict[str, Any]:
        """Waits for every parameter and places it.

        Args:
            place: called in this thread, for one parameter after the other; None = the tree holds the
                arrays themselves, each of them where a CPU device can use it in place.
            sharding_of: how a parameter shall lie on devices. Where the checkpoint holds parameters as
                such (Orbax), each device's part is then read on its own and `place` is not called.

        Returns:
            The nested dict that `model/` takes (kernels are [in, out], layer keys are ints).

        Raises:
            CheckpointError: a tensor cannot be read.
            RuntimeError: called twice.
        """
        if self._taken:
            raise RuntimeError("the parameters of this stream were taken before")
        self._taken = True
        if place is None:
            self._queue.keep()
        shardings = self._shardings(sharding_of)
        if self._waits and not shardings:
            self._start()
        params: dict[Any, Any] = {}
        try:
            for index, spec in enumerate(self._queue.specs):
                node = params
                for key in spec.path[:-1]:
                    node = node.setdefault(key, {})
                if index in shardings:
                    node[spec.path[-1]] = self._queue.read_onto(index, shardings[index])
                    continue
                # Beside shardings no thread reads: the bound is for one or the other.
                array = self._queue.read(index) if shardings else self._queue.get(index)
                node[spec.path[-1]] = array if place is None else place(spec.path, array)
                del array
                if not shardings:
                    self._queue.release(index)
        finally:
            self._queue.close()
        return params

    def _shardings(self, sharding_of: ShardingOf | None) -> dict[int, Any]:
        """Those of the parameters that are read onto devices by parts, by their numbers."""
        if sharding_of is None or not self._waits:
            return {}
        found = {i: sharding_of(spec.path) for i, spec in enumerate(self._queue.specs)}
        return {index: sharding for index, sharding in found.items() if sharding is not None}


class _Queue:
    """What the threads and `take` share: which parameters were claimed, and what they take in memory."""

    def __init__(
        self, checkpoint: Checkpoint, specs: list[ParamSpec], dtype: np.dtype, *, bounded: bool
    ):
        self.specs = specs
        self._checkpoint = checkpoint
        self._dtype = dtype
        infos = checkpoint.source.infos
        self._sizes = [dtype.itemsize * math.prod(spec.shape) for spec in specs]
        self._blocks = [_big_block_bytes(infos[spec.name]) for spec in specs]
        self._limit = 2 * max(self._sizes)
        self._bounded = bounded
        self._next = 0
        self._held = 0  # bytes of parameters begun and not released
        self._working = 0  # bytes of blocks that are being read
        self._closed = False
        self._read: dict[int, np.ndarray | BaseException] = {}
        self._changed = threading.Condition()

    def read(self, index: int) -> np.ndarray:
        """A parameter, read in the calling thread."""
        return read_param(self._checkpoint, self.specs[index], self._dtype)

    def read_all(self) -> None:
        """What a thread does: the next parameter, and again, until there is none."""
        while (index := self._claim()) is not None:
            try:
                array = self.read(index)
            except BaseException as error:  # noqa: BLE001 - raised again by whoever takes
                array = error
            with self._changed:
                self._working -= self._blocks[index]
                self._read[index] = array
                self._changed.notify_all()
            del array  # the next claim may have to wait, and this array must not wait with it

    def _claim(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_done or self._has_room)
            if self._is_done:
                return None
            index = self._next
            self._next += 1
            self._held += self._sizes[index]
            self._working += self._blocks[index]
            return index

    @property
    def _is_done(self) -> bool:
        return self._closed or self._next == len(self.specs)

    @property
    def _has_room(self) -> bool:
        held = self._working + (self._held if self._bounded else 0)
        if held == 0:
            return True  # alone it may take what it needs
        more = self._blocks[self._next] + (self._sizes[self._next] if self._bounded else 0)
        return held + more <= self._limit

    def get(self, index: int) -> np.ndarray:
        """Waits for a parameter; it counts as held until `release`."""
        with self._changed:
            self._changed.wait_for(lambda: index in self._read)
            found = self._read.pop(index)
        if isinstance(found, BaseException):
            raise found
        return found

    def release(self, index: int) -> None:
        """The parameter was placed, and what it took in host memory is free."""
        with self._changed:
            self._held -= self._sizes[index]
            self._changed.notify_all()

    def read_onto(self, index: int, sharding: Any) -> Any:
        """A parameter on its devices, in the calling thread."""
        source = self._checkpoint.source
        assert isinstance(source, ParamSource)
        return source.read_onto(self.specs[index].name, sharding, self._dtype)

    def keep(self) -> None:
        """Parameters stay where they are: reads on however many there are."""
        with self._changed:
            self._bounded = False
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody will take more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def read_param(checkpoint: Checkpoint, spec: ParamSpec, dtype: np.dtype) -> np.ndarray:
    """One parameter in memory of our own, in C order and as the tree holds it.

    A copy even where nothing changes: a view of the mapped file would fault if the file were cut
    under it. It is made block by block, so that what a quantised tensor takes in between is small.
    """
    param = aligned_empty(spec.tree_shape, dtype)
    stored = param.T if spec.transpose else param
    source = checkpoint.source
    info = source.infos[spec.name]
    step = rows_at_a_time(info.shape, info.block_rows)
    for begin in range(0, len(stored), step):
        part = stored[begin : begin + step]
        first = spec.first_row + begin
        if isinstance(source, ParamSource):
            source.read_into(spec.name, first, first + len(part), part)
        else:
            block = source.read(spec.name, first, first + len(part))
            np.copyto(part, block, casting="unsafe")
    return param


def rows_at_a_time(shape: tuple[int, ...], block_rows: int = 1) -> int:
    """How many rows of a tensor to read, or dequantise, or write at a time: a multiple of `block_rows`."""
    fit = _BLOCK_BYTES // max(1, _row_bytes(shape))
    return max(1, fit // block_rows) * block_rows


def _row_bytes(shape: tuple[int, ...]) -> int:
    return 4 * math.prod(shape[1:])


def _big_block_bytes(info: TensorInfo) -> int:
    """What reading a parameter takes beside it, where the format makes that more than a small block."""
    size = min(info.block_rows, info.shape[0]) * _row_bytes(info.shape)
    return size if size > _BLOCK_BYTES else 0


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that a CPU device can use in place, and that goes back to the system with its array."""
    size = dtype.itemsize * math.prod(shape)
    if size >= _MAPPED_BYTES:
        return np.frombuffer(mmap.mmap(-1, size), np.uint8).view(dtype).reshape(shape)
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)
