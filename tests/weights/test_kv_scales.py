"""Scales of the KV cache in a checkpoint: the names in the field, their shapes, and what is refused."""

import json
import logging
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.errors import CheckpointError
from jaxserve.weights.hf_directory import write_hf_directory
from jaxserve.weights.kv_scales import load_kv_scales
from jaxserve.weights.loader import load_params, open_checkpoint
from tests import checkpoints

FP8 = "fp8_e4m3"


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.fixture
def make(tmp_path):
    """Writes a random Llama (2 layers, 3 kv heads) with tensors beside its parameters."""

    def write(**extra: np.ndarray) -> Path:
        path = checkpoints.make_random_llama(tmp_path / "plain")
        tensors = load_file(path / "model.safetensors")
        prefixed = {f"model.layers.{name}": array for name, array in extra.items()}
        config = json.loads((path / "config.json").read_text())
        write_hf_directory(tmp_path / "scaled", config, {**tensors, **prefixed})
        return tmp_path / "scaled"

    return lambda extra: write(**extra)


def loaded(path: Path, kv_cache_dtype: str = FP8) -> list[tuple]:
    given = load_kv_scales(open_checkpoint(path), kv_cache_dtype)
    assert given is not None
    assert given.kv_cache_dtype == FP8
    return [
        tuple(None if scale is None else scale.tolist() for scale in one) for one in given.layers
    ]


NAMES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "vllm module": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "quark": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
}


@pytest.mark.parametrize("style", NAMES)
def test_c35_names_of_the_field(make, style):
    k, v = NAMES[style]
    path = make({f"0.{k}": f32(0.5), f"0.{v}": f32(2), f"1.{k}": f32(3), f"1.{v}": f32(4)})
    assert loaded(path) == [([0.5] * 3, [2.0] * 3), ([3.0] * 3, [4.0] * 3)]
    load_params(open_checkpoint(path), np.float32)  # none of them is an unknown tensor


@pytest.mark.parametrize("name", ["self_attn.kv_scale", "self_attn.attn.kv_scale"])
def test_one_scale_for_both_gives_way_to_one_of_its_own(make, name):
    path = make({f"0.{name}": f32(0.5), f"1.{name}": f32(0.25), "1.self_attn.v_scale": f32(7)})
    assert loaded(path) == [([0.5] * 3, [0.5] * 3), ([0.25] * 3, [7.0] * 3)]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.float32(0.5).reshape(()), [0.5, 0.5, 0.5]),
        (f32(0.5), [0.5, 0.5, 0.5]),
        (f32(1, 2, 3), [1.0, 2.0, 3.0]),
        (f32(1, 2, 3).reshape(3, 1, 1), [1.0, 2.0, 3.0]),
        (f32(0.5).astype(ml_dtypes.bfloat16), [0.5, 0.5, 0.5]),
        (f32(1, 2, 3).astype(np.float16), [1.0, 2.0, 3.0]),
    ],
)
def test_one_number_or_one_per_head(make, array, expected):
    path = make({"1.self_attn.k_scale": array})
    assert loaded(path) == [(None, None), (expected, None)]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"0.self_attn.k_scale": f32(np.nan)}, r"'model.layers.0.self_attn.k_scale': .* found nan"),
        ({"0.self_attn.k_scale": f32(np.inf)}, "above 0, found inf"),
        ({"1.self_attn.kv_scale": f32(0)}, r"layers.1.self_attn.kv_scale': .* found 0.0"),
        ({"0.self_attn.v_scale": f32(1, 2, -1)}, r"self_attn.v_scale': .* found -1.0"),
        ({"0.self_attn.v_scale": f32(1e-40)}, "finite number above 0"),
        (
            {"0.self_attn.k_scale": f32(1, 2)},
            r"k_scale': expected one scale or one for each of 3 kv heads, found shape \[2\]",
        ),
        ({"0.self_attn.k_scale": np.ones((3, 16), np.float32)}, r"found shape \[3, 16\]"),
        ({"0.self_attn.k_scale": np.ones(1, np.int32)}, "expected dtype .* found I32"),
        (
            {"0.self_attn.k_scale": f32(1), "0.self_attn.k_proj.k_scale": f32(2)},
            "give different scales",
        ),
    ],
)
def test_c35_a_scale_at_fault_is_named_and_only_where_it_would_be_used(make, tensors, message):
    checkpoint = open_checkpoint(make(tensors))
    with pytest.raises(CheckpointError, match=message):
        load_kv_scales(checkpoint, FP8)
    for unused in ("auto", "float32", "bfloat16", "int8"):
        assert load_kv_scales(checkpoint, unused) is None
    load_params(checkpoint, np.float32)


def test_two_names_that_agree_are_one_scale(make):
    path = make({"0.self_attn.k_scale": f32(2), "0.self_attn.attn.k_scale": f32(2)})
    assert loaded(path)[0] == ([2.0] * 3, None)


def test_int8_is_told_why_the_scales_are_not_its_own(make, caplog):
    path = make({"0.self_attn.k_scale": f32(1)})
    with caplog.at_level(logging.INFO, "jaxserve"):
        assert load_kv_scales(open_checkpoint(path), "int8") is None
    assert "its KV scales are those of fp8_e4m3; int8 is calibrated" in caplog.text


def test_without_scales_there_is_nothing(make):
    assert load_kv_scales(open_checkpoint(make({})), FP8) is None


def test_scales_of_queries_are_known_and_those_of_no_layer_are_not(make):
    load_params(open_checkpoint(make({"0.self_attn.q_scale": f32(1)})), np.float32)
    for name in ("2.self_attn.k_scale", "0.self_attn.k_zero_point", "0.mlp.k_scale"):
        with pytest.raises(CheckpointError, match=f"{name}'.* belongs to no parameter"):
            load_params(open_checkpoint(make({name: f32(1)})), np.float32)
