"""Orbax checkpoints as trainers write them: found wherever they lie, read whole, or refused by name."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1

from jaxserve.cli.resume import model_fingerprint
from jaxserve.errors import CheckpointError
from jaxserve.weights.hf_directory import read_generation_config
from jaxserve.weights.loader import load_params, open_checkpoint, resolve_model
from tests import checkpoints
from tests.weights.trees import assert_trees_equal


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return checkpoints.make_random_llama(
        tmp_path_factory.mktemp("hf") / "model", generation_config={"eos_token_id": [7]}
    )


@pytest.fixture(scope="module")
def params(source) -> dict:
    return load_params(open_checkpoint(source), np.float32)[0]


def on_device(params: dict) -> dict:
    return jax.tree.map(jnp.asarray, params)


def save_standard(path: Path, params: dict) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "params", on_device(params))


def save_here(path: Path, params: dict) -> None:
    path.rmdir()
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, params)


def save_files(path: Path, params: dict) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(path / "default", on_device(params))


def save_zarr3(path: Path, params: dict) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as checkpointer:
        checkpointer.save(path / "params", on_device(params))


def save_v1(path: Path, params: dict) -> None:
    v1.save(path / "5", on_device(params))


def save_steps(path: Path, params: dict) -> None:
    with ocp.CheckpointManager(path) as manager:
        for step, factor in ((9, 0.0), (10, 1.0)):  # the newest counts, and 10 is newer than 9
            tree = jax.tree.map(lambda leaf, f=factor: leaf * np.float32(f), params)
            manager.save(step, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()


def save_state(path: Path, params: dict) -> None:
    """A training state: the params are a part of it, their layers a list, each array in a box."""
    boxed = jax.tree.map(lambda leaf: {"value": leaf}, params)
    boxed["layers"] = [boxed["layers"][i] for i in sorted(boxed["layers"])]
    moments = {"m": np.ones(3, np.float32), "count": 3}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", {"params": boxed, "opt_state": moments, "step": 3})


SAVERS = [save_standard, save_here, save_files, save_zarr3, save_v1, save_steps, save_state]


@pytest.mark.parametrize("save", SAVERS, ids=[save.__name__ for save in SAVERS])
def test_whatever_orbax_writes_is_read(tmp_path, source, params, save):
    path = tmp_path / "model"
    path.mkdir()
    save(path, params)
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(source / name, path / name)
    checkpoint = open_checkpoint(resolve_model(path))
    assert checkpoint.config.eos_token_ids == (7,)
    assert_trees_equal(load_params(checkpoint, np.float32)[0], params)
    half, _ = load_params(open_checkpoint(path), np.float16)  # cast as it is read
    assert_trees_equal(half, jax.tree.map(lambda leaf: leaf.astype(np.float16), params))


@pytest.fixture
def model(tmp_path, source, params) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    save_standard(path, params)
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(source / name, path / name)
    return path


def test_the_folder_of_the_tree_itself_is_a_model(model, params, monkeypatch):
    item = model / "params"
    assert_trees_equal(load_params(open_checkpoint(item), np.float32)[0], params)
    assert read_generation_config(item) == {"eos_token_id": [7]}
    monkeypatch.chdir(model.parent)
    assert resolve_model("model/params") == Path("model/params")  # and no name on the hub
    (model / "config.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"params: an Orbax checkpoint without a config\.json"
    ):
        open_checkpoint(model)


def test_two_formats_in_one_folder_are_a_question(model, source, params):
    shutil.copyfile(source / "model.safetensors", model / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"holds safetensors \(model\.safetensors\) and an Orbax"
    ):
        open_checkpoint(model)
    assert_trees_equal(load_params(open_checkpoint(model / "params"), np.float32)[0], params)


def save_changed(model: Path, params: dict) -> None:
    shutil.rmtree(model / "params")
    save_standard(model, params)


def test_c34_arrays_that_are_missing_or_nobodys_or_of_another_kind(model, params):
    layer = params["layers"][1]

    def with_mlp(**changes: object) -> dict:
        mlp = {key: value for key, value in (layer["mlp"] | changes).items() if value is not None}
        return params | {"layers": params["layers"] | {1: layer | {"mlp": mlp}}}

    kernel = layer["mlp"]["gate"]["kernel"]
    for changed, message in (
        (with_mlp(gate=None), r"'layers/1/mlp/gate/kernel' is missing, expected shape \[48, 80\]"),
        (with_mlp(gate={"kernel": kernel.T}), r"gate/kernel': expected shape .* found \[80, 48\]"),
        (
            with_mlp(gate={"kernel": kernel.astype(np.int32)}),
            "gate/kernel': expected dtype float32, bfloat16, float16, found int32",
        ),
        (
            with_mlp(foo={"kernel": kernel}),
            r"'layers/1/mlp/foo/kernel' \(float32\[48, 80\]\) belongs",
        ),
    ):
        save_changed(model, changed)
        with pytest.raises(CheckpointError, match=message):
            load_params(open_checkpoint(model), np.float32)


def test_c34_a_damaged_store_is_an_error_and_no_zeros(model, params):
    save_changed(model, params)
    data = sorted((model / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
    for path in data[-8:]:  # the largest: where the arrays are
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"cannot be (read|opened)"):
        load_params(open_checkpoint(model), np.float32)
    (model / "params" / "manifest.ocdbt").unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.ocdbt: .* not written to its end"):
        open_checkpoint(model)
    (model / "params" / "_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match="_METADATA: not JSON"):
        open_checkpoint(model)
    (model / "params" / "_METADATA").write_text('{"tree_metadata": {"a": {}}}')
    with pytest.raises(CheckpointError, match="no entry of an Orbax checkpoint"):
        open_checkpoint(model)


def test_a_save_that_was_cut_short_is_no_checkpoint(model):
    cut = model / "params.orbax-checkpoint-tmp-17"
    (model / "params").rename(cut)
    with pytest.raises(CheckpointError, match=r"it has no \*\.safetensors"):
        open_checkpoint(model)
    with pytest.raises(CheckpointError, match="not written to its end"):
        open_checkpoint(cut)
    cut.rename(model / "7.orbax-checkpoint-tmp-18")  # of a CheckpointManager
    with pytest.raises(CheckpointError, match=r"it has no \*\.safetensors"):
        open_checkpoint(model)


def test_a_chunk_that_was_never_written_is_an_error(tmp_path, source, params):
    path = tmp_path / "model"
    path.mkdir()
    save_files(path, params)
    shutil.copyfile(source / "config.json", path / "config.json")
    (path / "default" / "norm.scale" / "0").unlink()
    with pytest.raises(CheckpointError, match="'norm/scale' cannot be read"):
        load_params(open_checkpoint(path), np.float32)


def test_other_weights_have_another_fingerprint(model, params):
    first = model_fingerprint(model)
    assert first == model_fingerprint(model / "params")
    copied = shutil.copytree(model, model.with_name("copy"))
    assert model_fingerprint(copied) == first
    save_changed(copied, params | {"norm": {"scale": params["norm"]["scale"] + 1}})
    assert model_fingerprint(copied) != first


def test_headers_are_read_without_jax(model):
    code = f"""
import sys
from jaxserve.weights.loader import check_tensors, open_checkpoint
check_tensors(open_checkpoint({str(model)!r}))
print("jax" in sys.modules, "orbax.checkpoint" in sys.modules, "tensorstore" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]


def test_our_own_is_restored_by_orbax_as_any_other(tmp_path, source, params):
    from jaxserve.weights.convert import convert

    convert(source, tmp_path / "out", format="orbax")
    device = jax.devices()[0]
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(device)
        ),
        params,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "out" / "params", target)
    assert isinstance(restored["norm"]["scale"], jax.Array)
    assert_trees_equal(restored, params)
    metadata = json.loads((tmp_path / "out" / "params" / "_METADATA").read_text())
    kinds = {entry["value_metadata"]["value_type"] for entry in metadata["tree_metadata"].values()}
    assert kinds == {"np.ndarray"}
