"""What we write in the format of safetensors is what its library writes, byte for byte."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.errors import CheckpointError
from jaxserve.weights.safetensors_writer import UnwrittenTensor, unwritten, write_file, write_shards

TENSORS = {
    "b": np.arange(3, dtype=np.float32),
    "odd": np.arange(5, dtype=ml_dtypes.bfloat16),  # what follows would lie askew
    "a": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "byte": np.arange(3, dtype=np.uint8),
    "scalar": np.float32(2).reshape(()),
    "é": np.zeros((0, 4), np.float16),
}


def test_the_bytes_are_those_of_the_library(tmp_path):
    write_file(tmp_path / "ours", unwritten(TENSORS))
    contiguous = {
        name: np.ascontiguousarray(one).reshape(one.shape) for name, one in TENSORS.items()
    }
    save_file(contiguous, tmp_path / "theirs", metadata={"format": "pt"})
    ours, theirs = ((tmp_path / name).read_bytes() for name in ("ours", "theirs"))
    found = load_file(tmp_path / "ours")
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
    assert len(ours) == len(theirs)
    wide = {name: one for name, one in contiguous.items() if one.dtype == np.float32}
    write_file(tmp_path / "ours", unwritten(wide))
    save_file(wide, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_tensor_larger_than_a_shard_gets_one_of_its_own(tmp_path):
    tensors = {
        "a": np.ones(10, np.float32),
        "b": np.ones(100, np.float32),
        "c": np.ones(1, np.float32),
    }
    write_shards(tmp_path, unwritten(tensors), max_shard_bytes=50)
    found = [sorted(load_file(path)) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert found == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (np.ones(3, np.float32), "tensor 'a': expected 16 bytes, got 12"),
        (np.ones(4, np.float16), "tensor 'a': expected blocks of float32, got float16"),
    ],
)
def test_blocks_that_are_not_what_was_said_are_an_error(tmp_path, block, message):
    tensor = UnwrittenTensor(
        name="a", dtype=np.dtype(np.float32), shape=(4,), blocks=lambda: [block]
    )
    with pytest.raises(CheckpointError, match=message):
        write_file(tmp_path / "file", [tensor])
