"""Weights on their way: how much of them lies in host memory at a time, and whose they are afterwards."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.weights import param_stream
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.convert import convert
from jaxserve.weights.loader import check_tensors, load_params, open_checkpoint
from jaxserve.weights.param_stream import ParamStream
from tests import checkpoints
from tests.gguf_files import write_gguf
from tests.weights.trees import assert_trees_equal


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Checkpoint:
    path = checkpoints.make_random_llama(
        tmp_path_factory.mktemp("stream") / "model", {"num_hidden_layers": 6}
    )
    return open_checkpoint(path)


def stream(checkpoint: Checkpoint, **options: bool) -> ParamStream:
    return ParamStream(checkpoint, check_tensors(checkpoint), np.float32, **options)


class Live:
    """Counts the bytes of parameters that are alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = self.most = self.total = self.largest = 0
        self._lock = threading.Lock()
        real = param_stream.aligned_empty

        def counted(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            array = real(shape, dtype)
            with self._lock:
                self.now += array.nbytes
                self.total += array.nbytes
                self.most = max(self.most, self.now)
                self.largest = max(self.largest, array.nbytes)
            weakref.finalize(array, self._drop, array.nbytes)
            return array

        monkeypatch.setattr(param_stream, "aligned_empty", counted)

    def _drop(self, num_bytes: int) -> None:
        with self._lock:
            self.now -= num_bytes


def test_what_is_placed_is_gone_and_no_more_than_two_are_read_ahead(model, monkeypatch):
    live = Live(monkeypatch)
    paths = []

    def place(path: tuple, array: np.ndarray) -> float:
        paths.append(path)
        time.sleep(0.001)  # readers would run ahead
        return float(array.sum())

    sums = stream(model, bounded=True).take(place)
    assert live.most <= 2 * live.largest
    assert live.total > 8 * live.largest  # or there was nothing to bound
    assert paths == [spec.path for spec in model.param_specs(model.config)]
    assert sums["norm"]["scale"] == pytest.approx(model.source.read("model.norm.weight").sum())


def test_the_control_without_the_bound_everything_is_read_ahead(model, monkeypatch):
    live = Live(monkeypatch)
    stream(model).take(lambda path, array: time.sleep(0.001))
    assert live.most > 4 * live.largest


def test_a_stream_waits_for_whoever_takes_it(model, monkeypatch):
    live = Live(monkeypatch)
    one = stream(model, bounded=True)
    time.sleep(0.2)
    assert 0 < live.now <= 2 * live.largest
    assert_trees_equal(one.take(), load_params(model, np.float32)[0])
    with pytest.raises(RuntimeError, match="taken before"):
        one.take()


def test_a_stream_that_nobody_takes_ends(model):
    names = {thread.name for thread in threading.enumerate()}
    one = stream(model, bounded=True)
    started = [t for t in threading.enumerate() if t.name.startswith("weights-")]
    assert started or not names  # on a quick machine they may be done already
    del one
    gc.collect()
    for thread in started:
        thread.join(timeout=20)
        assert not thread.is_alive()


@pytest.mark.parametrize("bounded", [True, False])
def test_a_parameter_that_cannot_be_read_or_placed_ends_the_stream(model, monkeypatch, bounded):
    real = param_stream.read_param

    def failing(checkpoint, spec, dtype):
        if spec.name == "model.layers.3.mlp.up_proj.weight":
            raise CheckpointError("gone")
        return real(checkpoint, spec, dtype)

    monkeypatch.setattr(param_stream, "read_param", failing)
    with pytest.raises(CheckpointError, match="gone"):
        stream(model, bounded=bounded).take(lambda path, array: None)
    with pytest.raises(ZeroDivisionError):
        stream(model, bounded=bounded).take(lambda path, array: 1 / 0)
    assert not [t for t in threading.enumerate() if t.name.startswith("weights-") and not t.daemon]


def test_blocks_of_any_size_give_the_same(model, tmp_path, monkeypatch):
    expected, _ = load_params(model, np.float32)
    convert(model.path, tmp_path / "orbax", format="orbax")
    for size in (1, 1000, 10_000):
        monkeypatch.setattr(param_stream, "_BLOCK_BYTES", size)
        for path in (model.path, tmp_path / "orbax"):
            assert_trees_equal(load_params(open_checkpoint(path), np.float32)[0], expected)


# Peak memory of a process that reads a model of 42 matrices of 4 MiB and two of 16 MiB, in MiB above what it
# had before. `place` takes the sum of each array, as a device with memory of its own would take the values.
MEASURE = """
import sys
import numpy as np
from jaxserve.weights.loader import check_tensors, open_checkpoint
from jaxserve.weights.param_stream import ParamStream

def status(field):
    line = next(one for one in open("/proc/self/status") if one.startswith(field))
    return int(line.split()[1]) / 1024

checkpoint = open_checkpoint({path!r})
config = check_tensors(checkpoint)
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
stream = ParamStream(checkpoint, config, {dtype!r}, bounded={bounded})
params = stream.take(lambda path, array: float(array.sum(dtype="float32")) if {bounded} else array)
print(status("VmHWM") - before)
"""
BIG = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
}
LARGEST_MIB = 16  # the embedding, f32


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Path:
    return checkpoints.make_random_llama(tmp_path_factory.mktemp("big") / "model", BIG)


def peak(path: Path, dtype: str, *, bounded: bool) -> float:
    code = MEASURE.format(path=str(path), dtype=dtype, bounded=bounded)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_a_process_never_holds_more_than_twice_the_largest(big, tmp_path):
    blocks = 14  # of two threads, and what the libraries take
    total = sum(path.stat().st_size for path in big.glob("*.safetensors")) / 2**20
    assert total > 12 * LARGEST_MIB
    assert peak(big, "float32", bounded=True) < 2 * LARGEST_MIB + blocks
    assert peak(big, "bfloat16", bounded=True) < LARGEST_MIB + blocks
    assert peak(big, "float32", bounded=False) > total  # the control
    quantised = write_gguf(
        tmp_path / "model.gguf",
        open_checkpoint(big),
        kinds=lambda name, shape: gguf.GGMLQuantizationType.Q8_0 if len(shape) == 2 else None,
    )
    assert peak(quantised, "float32", bounded=True) < 2 * LARGEST_MIB + blocks
    convert(big, tmp_path / "orbax", format="orbax")
    assert peak(tmp_path / "orbax", "float32", bounded=True) < 2 * LARGEST_MIB + 3 * blocks
