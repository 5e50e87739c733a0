"""What config.json files of each family say: defaults, flags, windows, layers without rope."""

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.hf_config.families import FAMILIES
from jaxserve.hf_config.read import read_hf_config
from jaxserve.model_config import ARCHITECTURES, ModelConfig

SHAPE = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
SLIDING, FULL = "sliding_attention", "full_attention"


def read(model_type: str, **changes) -> ModelConfig:
    return read_hf_config(SHAPE | {"model_type": model_type} | changes, None, "config.json")


def test_every_architecture_has_a_family():
    assert tuple(FAMILIES) == ARCHITECTURES


@pytest.mark.parametrize("name", FAMILIES)
def test_a_class_name_alone_is_enough(name):
    shape = SHAPE | {"num_key_value_heads": 2, "architectures": [FAMILIES[name].class_name]}
    assert read_hf_config(shape, None, "config.json") == read(name, num_key_value_heads=2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mistral", {"num_kv_heads": 8, "intermediate_size": 14336, "rope.theta": 1e4}),
        ("qwen2", {"num_kv_heads": 32, "vocab_size": 151936, "max_position_embeddings": 32768}),
        ("qwen3", {"num_kv_heads": 32, "head_dim": 128, "tie_word_embeddings": False}),
        ("smollm3", {"num_kv_heads": 4, "rope.theta": 2e6, "tie_word_embeddings": True}),
        ("phi3", {"num_kv_heads": 32, "rms_norm_eps": 1e-5, "vocab_size": 32064}),
        ("granite", {"num_kv_heads": 32, "attention_multiplier": 1.0, "logits_scaling": 1.0}),
        ("seed_oss", {"num_kv_heads": 8, "head_dim": 128, "qkv_bias": True}),
    ],
)
def test_defaults_are_those_of_transformers(name, expected):
    config = read(name, hidden_size=2048, num_attention_heads=32)
    for field, value in expected.items():
        owner = config.rope if field.startswith("rope.") else config
        assert getattr(owner, field.removeprefix("rope.")) == value, field


def test_null_kv_heads_are_as_many_as_query_heads_whatever_the_default():
    assert read("mistral", num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, True)),
        ("qwen2", {}, (True, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
        ("smollm3", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ("phi3", {"attention_bias": False}, (False, False, False)),
        ("granite", {"attention_bias": True}, (True, True, False)),
        ("seed_oss", {}, (True, False, False)),
        ("seed_oss", {"attention_bias": False, "attention_out_bias": True}, (False, True, False)),
    ],
)
def test_biases(name, given, expected):
    config = read(name, num_key_value_heads=2, head_dim=16, **given)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == expected


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("mistral", {"sliding_window": 9}, (9,) * 4),
        ("mistral", {}, (4096,) * 4),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 9, "layer_types": [SLIDING, FULL] * 2}, (9, None) * 2),
        ("ministral", {"layer_types": [FULL] * 4}, None),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 1}, None),
        (
            "qwen2",
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
            (None, 9, 9, 9),
        ),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        ("qwen3", {"use_sliding_window": True}, None),  # from layer 28 on
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING, FULL] * 2},
            (9, None) * 2,
        ),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 9}, (None, None, None, 9)),
        ("smollm3", {"sliding_window": 9}, None),
        ("phi3", {}, None),
        ("phi3", {"sliding_window": 9}, (9,) * 4),
        ("llama", {"sliding_window": None, "layer_types": [FULL] * 4}, None),
    ],
)
def test_windows(name, given, expected):
    assert read(name, num_key_value_heads=2, head_dim=16, **given).layer_windows == expected


def test_layers_without_rope():
    assert read("smollm3").rope_layers == (True, True, True, False)
    assert read("smollm3", no_rope_layer_interval=2).rope_layers == (True, False) * 2
    # The list may be longer than the model, as transformers has it.
    assert read("smollm3", no_rope_layers=[0, 1, 1, 1, 0]).rope_layers == (False, True, True, True)
    assert read("llama").rope_layers is None


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("llama", {"sliding_window": 9}, "sliding_window must be absent or null.*got 9"),
        ("llama", {"no_rope_layers": [1] * 4}, "no_rope_layers must be absent"),
        ("llama", {"layer_types": [SLIDING] * 4}, "layer_types must be 'full_attention' thr"),
        ("mistral", {"attention_bias": True}, "attention_bias must be false or absent.*got True"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias must be false or absent"),
        ("phi3", {"mlp_bias": True}, "mlp_bias must be false or absent"),
        ("mistral", {"sliding_window": 0}, r"sliding_window must be an integer in \[1, .*got 0"),
        ("mistral", {"layer_types": [FULL] * 3}, "layer_types must be a list of 4 entries"),
        ("mistral", {"layer_types": ["mamba"] * 4}, "layer_types must be a list of 'sliding"),
        ("qwen2", {"layer_types": [SLIDING] * 4}, "no window is in use"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers must be an integer >= 0, got -1"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window must be true or false, got 1"),
        ("smollm3", {"no_rope_layers": [1] * 3}, "no_rope_layers must be a list of at least 4"),
        ("smollm3", {"no_rope_layers": [2] * 4}, r"list of 1 \(the layer has rope\) and 0"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be an integer"),
        ("llama", {"residual_multiplier": 0.5}, "residual_multiplier must be 1.0 or absent"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier must be a finite number > 0"),
        ("granite", {"logits_scaling": "8"}, "logits_scaling must be a finite number, got '8'"),
        ("qwen3", {"head_dim": 33}, "head_dim must be even"),
        ("qwen3", {"architectures": ["Qwen2ForCausalLM"]}, r"must be \['Qwen3ForCausalLM'\]"),
    ],
)
def test_what_is_not_computed_is_refused(name, given, message):
    kv_heads = {"num_key_value_heads": 2}
    with pytest.raises(CheckpointError, match=message) as caught:
        read(name, **kv_heads | given)
    assert str(caught.value).startswith("config.json: ")
