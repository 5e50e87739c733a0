"""The tables of models and chips: exact parameter counts, and how a checkpoint becomes a shape."""

import dataclasses

import pytest

from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig
from jaxserve.plan.chips import CHIPS, chip_spec
from jaxserve.plan.models import MODELS, ModelSpec
from scripts.models import LLAMA_3_8B

# As their publishers count them: the sum over the tensors of the checkpoint.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
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
    attention = dataclasses.replace(config, attention_bias=True)
    assert ModelSpec.from_config(attention).num_params == plain + 2 * (32 + 16 + 16 + 32)
    mlp = dataclasses.replace(config, mlp_bias=True)
    assert ModelSpec.from_config(mlp).num_params == plain + 2 * (64 + 64 + 32)


def test_an_unknown_chip_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"chip must be one of v5e, .*, got 'b200'"):
        chip_spec("b200")
    assert chip_spec("h100") is CHIPS["h100"]
