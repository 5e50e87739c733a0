"""ModelConfig: what it refuses, what layers are like, and what a served context changes."""

import dataclasses

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.model_config import LayerKind, ModelConfig
from jaxserve.rope_config import RopeConfig

CONFIG = ModelConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=512,
)


def changed(**changes) -> ModelConfig:
    return dataclasses.replace(CONFIG, **changes)


def scaled(rope_type: str, **changes) -> ModelConfig:
    original = {"original_max_position_embeddings": 128}
    return changed(rope=RopeConfig(rope_type=rope_type, **original | changes))


def test_plain_layers_are_of_one_kind():
    assert CONFIG.layer_kinds == (LayerKind(),) * 4
    assert CONFIG.attention_scale == 0.25
    assert changed(attention_multiplier=0.5).attention_scale == 0.5


def test_layers_that_differ():
    config = changed(layer_windows=(8, None, 8, None), rope_layers=(True, True, False, False))
    assert config.layer_kinds == (
        LayerKind(window=8),
        LayerKind(),
        LayerKind(window=8, has_rope=False),
        LayerKind(has_rope=False),
    )


def test_a_window_that_nothing_lies_beyond_is_none():
    config = changed(layer_windows=(8, None, 64, None))
    assert config.at_context(65) == config
    assert config.at_context(64).layer_windows == (8, None, None, None)
    assert config.at_context(8).layer_windows is None


def test_rope_that_depends_on_the_text_is_settled_by_the_context_that_is_served():
    dynamic = scaled("dynamic", factor=3.0, context_len=128)
    assert dynamic.at_context(300).rope.context_len == 300
    assert CONFIG.at_context(300) == CONFIG


def test_only_rope_extends_a_context_beyond_what_the_file_says():
    assert CONFIG.longest_context == 512
    assert scaled("llama3", factor=8.0).longest_context == 512
    assert scaled("yarn", factor=8.0).longest_context == 1024
    assert scaled("yarn", factor=2.0).longest_context == 512
    assert scaled("dynamic", factor=6.0, context_len=128).longest_context == 768
    assert scaled("yarn", factor=2.0**31 - 1).longest_context == 2**31 - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gpt2"}, "architecture must be one of llama, mistral, .*got 'gpt2'"),
        ({"layer_windows": (8,)}, "layer_windows must be 4 entries, one per layer, got 1"),
        ({"rope_layers": ()}, "rope_layers must be 4 entries, one per layer, got 0"),
        ({"layer_windows": (0,) * 4}, r"sliding_window must be an integer in \[1, .*got 0"),
        ({"residual_multiplier": 0.0}, "residual_multiplier must be a finite number > 0, got 0.0"),
        ({"attention_multiplier": float("nan")}, "attention_multiplier must be a finite number"),
        ({"rope": None}, "rope must be a RopeConfig, got None"),
        ({"qk_norm": 1}, "qk_norm must be True or False, got 1"),
        ({"layer_windows": [8] * 4}, r"layer_windows must be a tuple or None, got \[8"),
        ({"rope_layers": (1, 0, 1, 0)}, "rope_layers must be True or False, got 1"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a finite number >= 0, got '1e-6'"),
        ({"rms_norm_eps": 1e39}, r"rms_norm_eps must be in \[1.17549e-38, .*got 1e\+39"),
        ({"logits_scaling": 1e-320}, "logits_scaling must be in .* as float32 is, got 1e-320"),
        ({"embedding_multiplier": 1e308}, r"embedding_multiplier must be in .*got 1e\+308"),
        ({"head_dim": 15}, "head_dim must be even .*got 15"),
        ({"num_layers": 1025}, r"num_layers must be an integer in \[1, 1024\], got 1025"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a finite number >= 0, got -1.0"),
    ],
)
def test_what_cannot_be_served_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        changed(**changes)
