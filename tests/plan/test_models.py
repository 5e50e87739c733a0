"""The tables of models and chips: exact parameter counts, and how a checkpoint becomes a shape."""

import dataclasses

import pytest

from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig
from jaxserve.plan.chips import CHIPS, chip_of_device, chip_spec
from jaxserve.plan.models import MODELS, ModelSpec
from scripts.models import LLAMA_3_8B

# As their publishers count them: the sum over the tensors of the checkpoint.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "llama-2-7b": 6_738_415_616,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "phi-3-mini": 3_821_079_552,
}


def test_every_model_has_as_many_parameters_as_published():
    assert {name: spec.num_params for name, spec in MODELS.items()} == PUBLISHED


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("llama-3-8b", 131072), ("llama-3-70b", 327680), ("qwen2.5-7b", 57344)]
)
def test_kv_bytes_of_a_token(name, num_bytes):
    assert MODELS[name].kv_bytes_per_token() == num_bytes
    assert MODELS[name].kv_bytes_per_token(item_bytes=1) == num_bytes // 2


def test_the_shape_of_a_checkpoint():
    assert ModelSpec.from_config(LLAMA_3_8B) == MODELS["llama-3-8b"]


def test_biases_of_a_checkpoint_are_counted():
    config = ModelConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=128,
    )
    plain = ModelSpec.from_config(config).num_params
    attention = dataclasses.replace(config, qkv_bias=True, o_bias=True)
    assert ModelSpec.from_config(attention).num_params == plain + 2 * (32 + 16 + 16 + 32)
    mlp = dataclasses.replace(config, mlp_bias=True)
    assert ModelSpec.from_config(mlp).num_params == plain + 2 * (64 + 64 + 32)


def test_two_chips_hold_half_but_for_norms():
    llama = MODELS["llama-3-8b"]
    half = llama.of_one_chip(2)
    assert 2 * half.num_params == llama.num_params + 4096 * (2 * 32 + 1)
    assert (half.num_heads, half.num_kv_heads, half.intermediate_size) == (16, 4, 7168)


def test_kv_heads_are_held_twice_by_twice_as_many_chips():
    llama = MODELS["llama-3-70b"]
    one = llama.of_one_chip(16)
    assert (one.num_heads, one.num_kv_heads) == (4, 1)
    norms = 8192 * (2 * 80 + 1)
    twice = 80 * 2 * 8192 * 8 * 128  # the k and v projections, a second time
    assert 16 * (one.num_params - norms) == llama.num_params - norms + twice
    assert one.kv_bytes_per_token() * 16 == 2 * llama.kv_bytes_per_token()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"32 query heads, got 3"),
        ({"num_heads": 33, "num_kv_heads": 3}, r"14336 columns of the MLP .*, got 3"),
        ({"num_heads": 36, "num_kv_heads": 2, "intermediate_size": 300}, r"2 kv heads or .* got 3"),
    ],
)
def test_chips_that_cannot_share_a_model_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(MODELS["llama-3-8b"], **changes).of_one_chip(3)


def test_the_vocabulary_is_filled_up_and_each_axis_may_be_cut_by_itself():
    odd = dataclasses.replace(MODELS["llama-3-8b"], vocab_size=1001)
    assert odd.of_one_chip(2).vocab_size == 501
    part = MODELS["llama-3-8b"].of_one_chip(4, ffn_chips=2, vocab_chips=1)
    assert (part.num_heads, part.intermediate_size, part.vocab_size) == (8, 7168, 128256)


def test_layers_are_counted_by_their_windows():
    spec = dataclasses.replace(MODELS["mistral-7b"], layer_windows=(None, 100, 100, 100) * 8)
    assert dict(spec.window_shares) == {None: 0.25, 100: 0.75}
    assert MODELS["mistral-7b"].window_shares == ((None, 1.0),)


def test_an_unknown_chip_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"chip must be one of v5e, .*, got 'b200'"):
        chip_spec("b200")
    assert chip_spec("h100") is CHIPS["h100"]


def test_a_device_is_found_by_what_jax_calls_it():
    assert chip_of_device("TPU v5 lite") is CHIPS["v5e"]
    assert chip_of_device("TPU v5") is CHIPS["v5p"]
    assert chip_of_device("NVIDIA H200") is CHIPS["h200"]
    assert chip_of_device("cpu") is None
    kinds = [kind for chip in CHIPS.values() for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))
