"""Checkpoints of every family: what transformers' modules call their tensors loads, in one file, in shards
and as GGUF, into the same params; and nothing that is stored is passed over."""

import dataclasses

import gguf
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.hf_config.read import read_hf_config
from jaxserve.model_config import ModelConfig
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.hf_directory import write_hf_directory
from jaxserve.weights.loader import load_params, open_checkpoint
from tests.checkpoints import random_tensors
from tests.families import CASES
from tests.gguf_files import WRITTEN_AS, can_be_written, write_gguf
from tests.numpy_llama import inverse_frequencies
from tests.weights.trees import assert_trees_equal

FAMILIES = sorted({case.config["model_type"] for case in CASES.values()})
WRITABLE = [
    name for name, case in CASES.items() if can_be_written(read_hf_config(case.config, None, name))
]


def params_of(checkpoint: Checkpoint) -> dict:
    return load_params(checkpoint, np.float32)[0]


@pytest.mark.parametrize("name", CASES)
def test_shards_hold_the_same_params(name, tmp_path):
    case = CASES[name]
    single = params_of(open_checkpoint(case.write(tmp_path / "single")))
    shards = case.write(tmp_path / "shards", max_shard_bytes=40_000)
    assert len(list(shards.glob("model-*.safetensors"))) > 2
    assert_trees_equal(params_of(open_checkpoint(shards)), single)


def test_fused_projections_are_cut_where_transformers_cuts_them(tmp_path):
    case = CASES["phi3_partial_tied"]  # one kv head: q, k and v differ in size
    params = params_of(open_checkpoint(case.write(tmp_path)))
    stored = random_tensors(case.config, seed=case.seed, initializer_range=case.initializer_range)
    layer = params["layers"][2]
    qkv = stored["model.layers.2.self_attn.qkv_proj.weight"]  # f32[64 + 16 + 16, 64]
    gate_up = stored["model.layers.2.mlp.gate_up_proj.weight"]
    for found, expected in (
        (layer["attn"]["q"], qkv[:64]),
        (layer["attn"]["k"], qkv[64:80]),
        (layer["attn"]["v"], qkv[80:]),
        (layer["mlp"]["gate"], gate_up[:80]),
        (layer["mlp"]["up"], gate_up[80:]),
    ):
        np.testing.assert_array_equal(found["kernel"], expected.T)


@pytest.mark.parametrize("family", FAMILIES)
def test_c31_what_belongs_to_no_parameter_is_an_error(family, tmp_path):
    case = CASES[family] if family in CASES else CASES[f"{family}_mixed"]
    tensors = random_tensors(case.config, seed=case.seed)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}  # harmless
    write_hf_directory(tmp_path / "ok", case.config, tensors | extra)
    params_of(open_checkpoint(tmp_path / "ok"))
    for name in (
        "model.layers.0.foo",
        "model.layers.4.input_layernorm.weight",
        "model.layers.0.self_attn.k_proj.bias.weight",
    ):
        path = tmp_path / name
        write_hf_directory(path, case.config, tensors | {name: np.ones(4, np.float32)})
        with pytest.raises(CheckpointError, match=f"tensor '{name}' .*belongs to no parameter"):
            params_of(open_checkpoint(path))
    for name in tensors:
        if name.startswith("model.layers.1."):
            path = tmp_path / f"without_{name}"
            write_hf_directory(path, case.config, {k: v for k, v in tensors.items() if k != name})
            with pytest.raises(CheckpointError, match=f"tensor '{name}' is missing"):
                params_of(open_checkpoint(path))


@pytest.mark.parametrize(
    ("name", "bias"),
    [
        ("llama", "self_attn.o_proj.bias"),
        ("llama", "mlp.down_proj.bias"),
        ("mistral", "self_attn.q_proj.bias"),
        ("qwen2", "self_attn.o_proj.bias"),
        ("qwen3", "self_attn.q_proj.bias"),
        ("phi3", "self_attn.qkv_proj.bias"),
        ("llama", "self_attn.q_norm.weight"),
    ],
)
def test_c31_a_bias_that_the_config_does_not_ask_for_is_never_dropped(name, bias, tmp_path):
    case = CASES[name]
    tensors = random_tensors(case.config, seed=case.seed)
    tensors[f"model.layers.0.{bias}"] = np.ones(64, np.float32)
    write_hf_directory(tmp_path, case.config, tensors)
    with pytest.raises(CheckpointError, match=f"{bias}' .*belongs to no parameter"):
        params_of(open_checkpoint(tmp_path))


def assert_same_model(found: ModelConfig, expected: ModelConfig) -> None:
    """Two configs of which the first went through GGUF: the same numbers, by whatever name."""
    assert found.attention_scale == pytest.approx(expected.attention_scale, rel=1e-6)
    rope = dataclasses.replace(found.rope, attention_factor=expected.rope.attention_factor)
    assert found.rope.attention_factor == pytest.approx(expected.rope.attention_factor, rel=1e-6)
    if expected.rope.rope_type == "llama3":  # its frequencies alone are stored
        assert rope.rope_type == "longrope"
        plain = expected.rope.theta ** -(np.arange(0, expected.head_dim, 2) / expected.head_dim)
        divisors = plain / inverse_frequencies(expected.rope, expected.head_dim)
        np.testing.assert_allclose(rope.short_factors, divisors, rtol=1e-6)
        np.testing.assert_allclose(rope.long_factors, divisors, rtol=1e-6)
        rope = expected.rope
    same = {"rope": rope, "attention_multiplier": expected.attention_multiplier}
    same |= {"architecture": expected.architecture}  # mistral without a window is a llama
    assert dataclasses.replace(found, **same) == expected


@pytest.mark.parametrize("name", WRITABLE)
def test_c33_gguf_holds_the_same_params(name, tmp_path):
    model = open_checkpoint(CASES[name].write(tmp_path / "hf"))
    loaded = open_checkpoint(write_gguf(tmp_path / "m.gguf", model))
    assert_same_model(loaded.config, model.config)
    assert_trees_equal(params_of(loaded), params_of(model))


def test_every_family_can_be_written_but_one():
    families = {CASES[name].config["model_type"] for name in WRITABLE}
    assert set(FAMILIES) - families == {"ministral"}


@pytest.mark.parametrize("name", ["qwen2", "llama", "phi3"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q4_0", "BF16", "F16"])
def test_quantised_files_of_a_family_give_what_their_blocks_say(name, kind, tmp_path):
    """Rows of q and k are put in order after dequantisation, and parts of a fused tensor are cut from it."""
    kind = gguf.GGMLQuantizationType[kind]
    model = open_checkpoint(CASES[name].write(tmp_path / "hf"))
    width = model.config.hidden_size

    def kinds(tensor: str, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType | None:
        return kind if len(shape) == 2 and shape[1] == width else None

    params = params_of(open_checkpoint(write_gguf(tmp_path / "m.gguf", model, kinds=kinds)))
    stored = {}
    for tensor, array in model.tensors():
        if array.ndim == 2 and array.shape[1] == width:
            array = gguf.dequantize(gguf.quantize(array, kind), kind).reshape(array.shape)
        stored[tensor] = array
    write_hf_directory(tmp_path / "rounded", CASES[name].config, stored)
    assert_trees_equal(params, params_of(open_checkpoint(tmp_path / "rounded")))


def test_two_names_of_one_tensor_are_refused(tmp_path):
    model = open_checkpoint(CASES["seed_oss"].write(tmp_path / "hf"))
    extra = {"blk.0.ffn_norm.weight": np.ones(64, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", model, extra=extra)
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_norm\.weight' are the same one"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        (
            "qwen2",
            {"qwen2.attention.sliding_window": 7},
            r"sliding_window must be 0 for this family, or >= context_length \(512\)",
        ),
        (
            "qwen3",
            {"qwen3.attention.sliding_window": 7, "qwen3.attention.sliding_window_pattern": 2},
            "beside a sliding_window_pattern of booleans",
        ),
        (
            "llama_biases",
            {"llama.attention.sliding_window": 7},
            "sliding_window must be 0 for this family",
        ),
        (
            "phi3",
            {"phi3.rope.dimension_count": 17},
            r"rope\.dimension_count must be in \[1, 16\] \(the head size\), got 17",
        ),
        (
            "qwen3",
            {"qwen3.rope.dimension_count": 16},
            r"rope\.dimension_count must be the head size \(32\), got 16",
        ),
        (
            "phi3_longrope_within",
            {"phi3.rope.scaling.type": "yarn"},
            r"must be 'none' or 'longrope' beside rope_factors_long\.weight",
        ),
    ],
)
def test_metadata_that_no_config_expresses_is_refused(name, metadata, message, tmp_path):
    model = open_checkpoint(CASES[name].write(tmp_path / "hf"))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", model, metadata=metadata))


def test_a_window_of_the_whole_context_is_none(tmp_path):
    model = open_checkpoint(CASES["qwen2"].write(tmp_path / "hf"))
    metadata = {"qwen2.attention.sliding_window": 512}
    loaded = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, metadata=metadata))
    assert loaded.config.layer_windows is None


def test_files_of_mistral_are_called_llama(tmp_path):
    assert WRITTEN_AS == {"mistral": "llama"}
    model = open_checkpoint(CASES["mistral_window"].write(tmp_path / "hf"))
    loaded = open_checkpoint(write_gguf(tmp_path / "m.gguf", model))
    assert loaded.config.architecture == "mistral"
    assert loaded.config.layer_windows == (7, 7, 7, 7)
