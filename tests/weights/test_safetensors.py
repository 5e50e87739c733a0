"""Reading *.safetensors: the header against the file, shards against the index, lookalikes by content."""

import json
import pickle
import struct
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.errors import CheckpointError
from jaxserve.weights.safetensors import SafetensorsSource, find_shards, read_header


def write_raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def row(
    dtype: str = "F32", shape: tuple[int, ...] = (2,), offsets: tuple[int, int] = (0, 8)
) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_c34_f32_f16_and_bf16_read_back_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 5)).astype(np.float32)
    tensors = {
        "a": x,
        "b": x.astype(np.float16),
        "c": x.astype(ml_dtypes.bfloat16),
        "empty": x[:0],
        "scalar": x[0, 0],
    }
    save_file(
        {name: np.asarray(array) for name, array in tensors.items()}, tmp_path / "m.safetensors"
    )
    source = SafetensorsSource([tmp_path / "m.safetensors"])
    assert {name: info.dtype for name, info in source.infos.items()} == {
        **{"a": "F32", "b": "F16", "c": "BF16", "empty": "F32", "scalar": "F32"}
    }
    for name, array in tensors.items():
        found = source.read(name)
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert found.tobytes() == array.tobytes()
    assert not source.read("a").flags.writeable


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"t": row()}, b"1234567", r"tensor 't' ends at byte \d+, the file has \d+: truncated"),
        ({"t": row()}, b"123456789", r"the tensors end at byte \d+, the file has \d+"),
        (
            {"t": row(offsets=(4, 12))},
            b"123456789012",
            r"tensor 't' begins at byte \d+, expected \d+",
        ),
        ({"t": row(), "u": row(offsets=(4, 12))}, b"123456789012", "tensor 'u' begins at byte"),
        (
            {"t": row(shape=(3,))},
            b"12345678",
            r"tensor 't': F32\[3\] is 12 bytes, data_offsets \[0, 8\] hold 8",
        ),
        ({"t": row(shape=(2**33, 2**33))}, b"12345678", "tensor 't'.*hold 8"),
        ({"t": row(offsets=(8, 0))}, b"12345678", "hold -8"),
        ({"t": row(offsets=(-8, 0))}, b"12345678", "data_offsets must be"),
        ({"t": row(shape=(-2,))}, b"12345678", "shape must be a list of sizes"),
        ({"t": row(dtype="F31")}, b"12345678", "unknown dtype 'F31'"),
        ({"t": 5}, b"", "expected an object in the header"),
        ([1], b"", "the header must be a JSON object, got list"),
        (b"{nope", b"", "the header is not JSON"),
        (b'{"t":{},"t":{}}', b"", "'t' stands twice in the header"),
    ],
)
def test_c34_a_header_that_does_not_fit_its_file_names_file_and_tensor(
    tmp_path, header, data, message
):
    path = write_raw(tmp_path / "m.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_c34_header_length_beyond_the_file(tmp_path):
    path = write_raw(tmp_path / "m.safetensors", {}, length=2**40)
    with pytest.raises(
        CheckpointError, match="the header says it is 1099511627776 bytes long, the limit is 2"
    ):
        read_header(path)
    path.write_bytes(b"1234")
    with pytest.raises(CheckpointError, match="8 bytes or more"):
        read_header(path)


def test_c34_lookalikes_are_refused_by_content(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps({"a": [1.0]}))
    with pytest.raises(CheckpointError, match="found a pickle"):
        find_shards(tmp_path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    with pytest.raises(CheckpointError, match=r"found a zip archive, as torch\.save writes it"):
        find_shards(tmp_path)
    for start, kind in (
        (b"GGUF\3\0\0\0", "a GGUF file"),
        (b"version https://git-lfs.github.com/spec", "Git LFS"),
    ):
        path.write_bytes(start + b"\0" * 40)
        with pytest.raises(CheckpointError, match=kind):
            find_shards(tmp_path)


@pytest.mark.parametrize("length", [640, 896, 1152, 0x3C20, 0x8B1F, 0x484480])
def test_a_header_of_any_length_is_no_lookalike(tmp_path, length):
    header = json.dumps({"a": row()}).encode()
    path = write_raw(tmp_path / "model.safetensors", header.ljust(length), b"\0" * 8)
    assert list(read_header(path)) == ["a"]


def sharded(directory: Path, shards: dict[str, list[str]], index: dict[str, str] | None) -> None:
    for file, names in shards.items():
        save_file({name: np.full(2, len(name), np.float32) for name in names}, directory / file)
    if index is not None:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_c34_index_is_obeyed(tmp_path):
    sharded(tmp_path, {ONE: ["a"], TWO: ["b"], "other.safetensors": ["a"]}, {"a": ONE, "b": TWO})
    source = find_shards(tmp_path)
    assert {name: info.file.name for name, info in source.infos.items()} == {"a": ONE, "b": TWO}


@pytest.mark.parametrize(
    ("shards", "index", "message"),
    [
        ({ONE: ["a"]}, {"a": ONE, "b": TWO}, f"{TWO}: shard is missing"),
        ({ONE: ["a"]}, None, f"{TWO}: shard is missing"),
        ({ONE: ["a"], TWO: ["c"]}, {"a": ONE, "b": TWO, "c": TWO}, f"{TWO}: tensor 'b' is missing"),
        (
            {ONE: ["a", "b"], TWO: ["c"]},
            {"a": ONE, "b": TWO, "c": TWO},
            f"{ONE}: tensor 'b' is here, the index",
        ),
        ({ONE: ["a", "b"], TWO: ["b"]}, {"a": ONE, "b": TWO}, f"'b' is stored twice.*{ONE}.*{TWO}"),
        ({ONE: ["a"], TWO: ["a"]}, None, f"'a' is stored twice.*{ONE}.*{TWO}"),
        ({ONE: ["a", "b"], TWO: ["c"]}, {"a": ONE, "c": TWO}, f"{ONE}: tensor 'b' is not in"),
        ({ONE: ["a"]}, {"a": "../" + ONE}, "shard must be a .*file beside it"),
        ({ONE: ["a"]}, {"a": "pytorch_model.bin"}, "shard must be a .*got 'pytorch_model.bin'"),
    ],
)
def test_c34_shards_that_do_not_fit_the_index(tmp_path, shards, index, message):
    sharded(tmp_path, shards, index)
    with pytest.raises(CheckpointError, match=message):
        find_shards(tmp_path)


def test_c34_two_shards_without_an_index_work(tmp_path):
    sharded(tmp_path, {ONE: ["a"], TWO: ["b"]}, None)
    assert find_shards(tmp_path).infos.keys() == {"a", "b"}


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_c34_a_broken_index_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        find_shards(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (5, r"weight_map\['b'\] must be a file name, got 5"),
        (None, r"weight_map\['b'\] must be a file name, got None"),
        (["x" * 10_000], r"weight_map\['b'\] must be a file name, got \['x{50}"),
    ],
)
def test_c34_a_bad_entry_of_the_index_is_named_alone(tmp_path, entry, message):
    names = {f"good{i}": ONE for i in range(1000)}
    index = {"weight_map": {**names, "b": entry}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message) as caught:
        find_shards(tmp_path)
    assert "good" not in str(caught.value)
    assert len(str(caught.value)) < len(str(tmp_path)) + 300
