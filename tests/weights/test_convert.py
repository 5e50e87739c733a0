"""From one format to another and back: the same weights, the same files beside them, whole or not at all."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.errors import CheckpointError
from jaxserve.model.kv_scales import GivenKVScales
from jaxserve.weights import convert as convert_module
from jaxserve.weights.convert import convert
from jaxserve.weights.hf_directory import read_generation_config, write_hf_directory
from jaxserve.weights.kv_scales import load_kv_scales
from jaxserve.weights.loader import load_params, open_checkpoint
from jaxserve.weights.whole_folder import whole_folder
from tests import checkpoints
from tests.families import CASES
from tests.llms import TINY
from tests.weights.trees import assert_trees_equal

TEXTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def load(path: Path, dtype: object = np.float32) -> dict:
    return load_params(open_checkpoint(path), dtype)[0]


def stored(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of a directory, as the safetensors library reads them."""
    found: dict[str, np.ndarray] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


# One model of each family: fused projections, biases, norms of heads, tied heads among them.
FAMILIES = {case.config["model_type"]: case for case in CASES.values()}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_to_orbax_and_back_nothing_changes(tmp_path, family):
    source = FAMILIES[family].write(tmp_path / "source")
    convert(source, tmp_path / "orbax", format="orbax")
    assert not list((tmp_path / "orbax").glob("*.safetensors"))
    assert_trees_equal(load(tmp_path / "orbax"), load(source))
    convert(tmp_path / "orbax", tmp_path / "back", format="safetensors", max_shard_bytes=60_000)
    assert (tmp_path / "back" / "model.safetensors.index.json").is_file()
    expected, found = stored(source), stored(tmp_path / "back")
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
    assert_trees_equal(load(tmp_path / "back"), load(source))


@pytest.mark.parametrize("format", convert_module.FORMATS)
def test_what_lies_beside_the_weights_comes_along(tmp_path, format):
    source = shutil.copytree(TINY, tmp_path / "source")
    (source / "merges.txt").write_text("a b\n")  # not ours to read, but transformers'
    (source / "notes.md").write_text("not a part of the model")
    for number in range(2):  # from what it made itself, too
        convert(source, tmp_path / f"{number}", format=format)
        source = tmp_path / f"{number}"
        for name in (*TEXTS, "config.json", "merges.txt"):
            text = "a b\n" if name == "merges.txt" else (TINY / name).read_text()
            assert (source / name).read_text() == text
        assert not (source / "notes.md").exists()
        assert read_generation_config(source) == read_generation_config(TINY)


@pytest.mark.parametrize("format", convert_module.FORMATS)
def test_another_dtype_is_stored_and_said(tmp_path, format):
    source = checkpoints.make_random_llama(tmp_path / "source", {"torch_dtype": "float32"})
    convert(source, tmp_path / "bf16", format=format, dtype="bfloat16")
    infos = open_checkpoint(tmp_path / "bf16").source.infos.values()
    assert {info.dtype for info in infos} <= {"BF16", "bfloat16"}
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert_trees_equal(
        load(tmp_path / "bf16", ml_dtypes.bfloat16), load(source, ml_dtypes.bfloat16)
    )


def test_a_value_that_the_dtype_cannot_hold_is_an_error(tmp_path):
    source = checkpoints.make_random_llama(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 70_000.0
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*float16 cannot hold.*70000"):
        convert(source, tmp_path / "half", format="safetensors", dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    tensors["model.norm.weight"][3] = 60_000.0
    save_file(tensors, source / "model.safetensors")
    convert(source, tmp_path / "half", format="safetensors", dtype="float16")
    assert load(tmp_path / "half")["norm"]["scale"][3] == 60_000.0


def test_scales_of_the_kv_cache_survive(tmp_path):
    plain = checkpoints.make_random_llama(tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    scales = {
        f"model.layers.{layer}.self_attn.{part}_scale": np.float32([0.5 + layer])
        for layer in range(2)
        for part in "kv"
    }
    config = json.loads((plain / "config.json").read_text())
    write_hf_directory(tmp_path / "source", config, tensors | scales)

    def scales_of(path: Path) -> GivenKVScales:
        found = load_kv_scales(open_checkpoint(path), "fp8_e4m3")
        assert found is not None
        return found

    convert(tmp_path / "source", tmp_path / "orbax", format="orbax", dtype="bfloat16")
    convert(tmp_path / "orbax", tmp_path / "back", format="safetensors")
    for path in (tmp_path / "orbax", tmp_path / "back"):
        for layer, one in enumerate(scales_of(path).layers):
            np.testing.assert_array_equal(one.k, np.full(3, 0.5 + layer, np.float32))
    assert load_kv_scales(open_checkpoint(plain), "fp8_e4m3") is None  # the control


@pytest.mark.parametrize("format", convert_module.FORMATS)
def test_c30_a_head_that_differs_is_kept_and_the_config_says_so(tmp_path, format, caplog):
    source = checkpoints.make_random_llama(tmp_path / "source", {"tie_word_embeddings": True})
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    config = json.loads((source / "config.json").read_text())
    write_hf_directory(source, config, tensors)
    convert(source, tmp_path / "out", format=format)
    assert open_checkpoint(tmp_path / "out").config.tie_word_embeddings is False
    np.testing.assert_array_equal(
        load(tmp_path / "out")["lm_head"]["kernel"], tensors["lm_head.weight"].T
    )
    if format == "orbax":  # one whose config says that they are tied
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        (tmp_path / "out" / "config.json").write_text(
            json.dumps(written | {"tie_word_embeddings": True})
        )
        caplog.clear()
        assert "lm_head" in load(tmp_path / "out")
        assert "the stored lm_head/kernel differs from embed/embedding" in caplog.text


def test_what_is_in_the_way_stays(tmp_path):
    for name in ("full", "file"):
        (tmp_path / name).mkdir() if name == "full" else (tmp_path / name).write_text("mine")
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("full", "file", "link"):
        with pytest.raises(CheckpointError, match=f"{name}: is there already"):
            convert(TINY, tmp_path / name, format="safetensors")
    assert (tmp_path / "full" / "mine").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    convert(TINY, tmp_path / "empty", format="safetensors")
    open_checkpoint(tmp_path / "empty")
    # DST in SRC
    convert(tmp_path / "empty", tmp_path / "empty" / "inner", format="safetensors")
    open_checkpoint(tmp_path / "empty" / "inner")


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(CheckpointError, match=r"not enough room: .* [0-9,]+ bytes, 1,000,000 are"):
        convert(TINY, tmp_path / "out", format="safetensors")
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments(tmp_path):
    for options, message in (
        ({"format": "gguf"}, "format must be one of safetensors, orbax, got 'gguf'"),
        ({"format": "orbax", "dtype": "int8"}, "dtype must be one of float32, bfloat16, float16"),
        ({"format": "orbax", "max_shard_bytes": 0}, "max_shard_bytes must be 1 or more, got 0"),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert(TINY, tmp_path / "out", **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        convert(TINY, tmp_path / "file" / "out", format="safetensors")


# Ends the process, as kill -9 or Ctrl-C do, at one call of one function.
DIE = """
import os, signal, sys
from pathlib import Path
from jaxserve.weights import convert, save, safetensors_writer
module, name, count = {where!r}
module = dict(convert=convert, save=save, safetensors_writer=safetensors_writer)[module]
real, calls = getattr(module, name), [0]
def dying(*args, **kwargs):
    calls[0] += 1
    if calls[0] == count:
        os.kill(os.getpid(), signal.{signal})
    return real(*args, **kwargs)
setattr(module, name, dying)
convert.convert({source!r}, Path({target!r}), format={format!r}, max_shard_bytes=300_000)
"""
MOMENTS = {
    "safetensors": [
        ("safetensors_writer", "write_file", 2),  # between two shards
        ("safetensors_writer", "_write_tensor", 9),  # within one
        ("convert", "_write_texts", 1),  # all weights, no config
        ("convert", "write_json", 1),
    ],
    "orbax": [
        ("save", "read_param", 5),  # within Orbax's own write
        ("convert", "write_json", 1),
    ],
}


def stopped(
    where: tuple[str, str, int], target: Path, format: str, signal_name: str
) -> subprocess.CompletedProcess:
    code = DIE.format(
        where=where, source=str(TINY), target=str(target), format=format, signal=signal_name
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=240)


@pytest.mark.parametrize("format", convert_module.FORMATS)
def test_an_interrupted_convert_leaves_nothing(tmp_path, format):
    """Not even where Orbax's threads still write."""
    for where in MOMENTS[format][:2]:
        done = stopped(where, tmp_path / "out", format, "SIGINT")
        assert done.stderr.decode().rstrip().endswith("KeyboardInterrupt")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", convert_module.FORMATS)
def test_a_killed_convert_leaves_nothing_that_loads(tmp_path, format):
    target = tmp_path / "out"
    for where in MOMENTS[format]:
        done = stopped(where, target, format, "SIGKILL")
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        assert not target.exists()
        left = list(tmp_path.iterdir())
        assert len(left) == 1, where  # what the kill before left behind is gone
        for folder in [left[0], *(path for path in left[0].rglob("*") if path.is_dir())]:
            with pytest.raises(CheckpointError):
                open_checkpoint(folder)
    convert(TINY, target, format=format, max_shard_bytes=300_000)
    assert list(tmp_path.iterdir()) == [target]
    assert_trees_equal(load(target), load(TINY))


def test_a_writer_that_lives_keeps_its_folder(tmp_path):
    target, other = tmp_path / "out", tmp_path / ".out.unfinished-1"
    other.mkdir()
    handle = os.open(other, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as its writer does
    with whole_folder(target) as folder:
        assert other.is_dir()
        assert not target.exists()
    assert target.is_dir()
    assert not folder.exists()
    os.close(handle)  # as the system does once the writer is gone
    target.rmdir()
    with whole_folder(target):
        assert not other.exists()


def test_who_comes_second_leaves_what_the_first_made(tmp_path):
    def make(target: Path) -> None:
        with whole_folder(target) as folder:
            (folder / "file").write_text("second")
            target.mkdir()
            (target / "file").write_text("first")

    with pytest.raises(CheckpointError, match="is there already"):
        make(tmp_path / "out")
    assert (tmp_path / "out" / "file").read_text() == "first"
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
