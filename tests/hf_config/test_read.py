"""read_hf_config: spellings, defaults, and what is refused by key, value and limit."""

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.hf_config.read import read_hf_config
from jaxserve.model_config import ModelConfig
from jaxserve.rope_config import RopeConfig

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


KV_ALONE = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
}


def read(changes: dict, generation_config: dict | None = None) -> ModelConfig:
    return read_hf_config(BASE | changes, generation_config, "config.json")


def test_missing_keys_take_the_class_defaults_of_transformers():
    config = read_hf_config({"model_type": "llama"}, None, "config.json")
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (32000, 4096, 11008)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (
        32,
        32,
        32,
        128,
    )
    assert (config.rms_norm_eps, config.rope.theta, config.tie_word_embeddings) == (
        1e-6,
        10000.0,
        False,
    )
    assert (config.eos_token_ids, config.bos_token_id) == ((), None)


def spellings(rope_type: str, parameters: dict) -> list[dict]:
    theta = 500000.0
    return [
        {"rope_theta": theta, "rope_scaling": {"rope_type": rope_type, **parameters}},
        {"rope_theta": theta, "rope_scaling": {"type": rope_type, **parameters}},
        {
            "rope_theta": theta,
            "rope_scaling": {"type": rope_type, "rope_type": rope_type, **parameters},
        },
        {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **parameters}},
        {"rope_theta": theta, "rope_parameters": {"rope_type": rope_type, **parameters}},
        {
            "rope_theta": theta,
            "rope_scaling": {"rope_type": rope_type, **parameters},
            "rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **parameters},
        },
    ]


@pytest.mark.parametrize(
    ("rope_type", "parameters"), [("llama3", LLAMA3), ("linear", {"factor": 4.0}), ("default", {})]
)
def test_c29_every_spelling_of_rope_reads_the_same(rope_type, parameters):
    expected = RopeConfig(theta=500000.0, rope_type=rope_type, **parameters)
    for changes in spellings(rope_type, parameters):
        assert read(changes).rope == expected, changes


def test_c29_null_rope_scaling_is_default():
    assert read({"rope_theta": 500000.0, "rope_scaling": None}).rope == RopeConfig(theta=500000.0)
    assert read({"rope_parameters": {"rope_theta": 500000}}).rope == RopeConfig(theta=500000.0)


@pytest.mark.parametrize("rope_type", ["foo", "proportional"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_c29_unknown_rope_types_are_refused_by_name(rope_type, key):
    for outer in ("rope_scaling", "rope_parameters"):
        with pytest.raises(
            CheckpointError, match=rf"config.json: {outer}\.{key} must be one of.*'{rope_type}'"
        ):
            read({outer: {key: rope_type, "factor": 2.0}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    **LLAMA3,
                    "original_max_position_embeddings": None,
                }
            },
            "original_max",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
            "low_freq_factor must be <",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": None}},
            "rope_scaling.factor must be",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor must be a finite number, got None",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "rope factor must be a finite number > 0, got 0",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2}},
            "the same as rope_type",
        ),
        (
            {"rope_scaling": {"rope_type": "default", "mscale": 2.0}},
            "rope_scaling.mscale must be absent",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2},
                "rope_parameters": {"rope_theta": 1e4},
            },
            "must agree",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters.full_attention",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be 1.0, got 0.5",
        ),
        ({"rope_scaling": ["linear"]}, r"rope_scaling must be an object, got \['linear'\]"),
        ({"rope_scaling": 5}, "rope_scaling must be an object, got 5"),
        ({"rope_scaling": []}, r"rope_scaling must be an object, got \[\]"),
        ({"rope_scaling": 0}, "rope_scaling must be an object, got 0"),
        ({"rope_scaling": ""}, "rope_scaling must be an object, got ''"),
        ({"rope_parameters": []}, r"rope_parameters must be an object, got \[\]"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": []}, "rope_scaling must be an"),
        ({"rope_scaling": {"rope_type": ""}}, "rope_scaling.rope_type must be one of"),
        ({"rope_scaling": {"type": []}}, "rope_scaling.type must be one of"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers must be .*\[1, 1024\], got 1000000000"),
        ({"num_hidden_layers": 1025}, r"num_hidden_layers must be .*\[1, 1024\], got 1025"),
        ({"rope_theta": "1e4"}, "rope_theta must be a finite number, got '1e4'"),
        (
            {"rope_theta": 10**400},
            "rope_theta must be a finite number, got an integer of 1329 bits",
        ),
        ({"rope_theta": -1}, "rope theta must be a finite number > 0, got -1"),
    ],
)
def test_c29_rope_that_is_not_computed_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read(changes)
    assert str(caught.value).startswith("config.json: ")


def test_c32_head_dim_comes_from_the_config_and_null_means_derived():
    assert read({"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 32}).head_dim == 32
    derived = read(
        {"hidden_size": 90, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": None}
    )
    assert derived.head_dim == 10
    assert read({"num_attention_heads": 4, "num_key_value_heads": None}).num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_attention_heads": 10, "num_key_value_heads": 3, "head_dim": 16},
            r"num_attention_heads must be a multiple of num_key_value_heads \(3\), got 10",
        ),
        (
            {"num_attention_heads": 9},
            r"hidden_size must be a multiple of num_attention_heads \(9\), got 96",
        ),
        ({"head_dim": 25}, "head_dim must be even.*got 25"),
        ({"head_dim": 0}, "head_dim must be an integer in .*got 0"),
        ({"hidden_size": 96.0}, r"hidden_size must be an integer in .*got 96\.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer.*got True"),
        ({"vocab_size": "100"}, "vocab_size must be an integer.*got '100'"),
        ({"vocab_size": 2**31}, "vocab_size must be an integer in .*got 2147483648"),
        ({"num_attention_heads": -4}, "num_attention_heads must be an integer.*got -4"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number, got nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be absent"),
        ({"quantization_config": KV_ALONE | {"config_groups": {"a": 1}}}, "must be absent"),
        ({"quantization_config": KV_ALONE | {"kv_cache_scheme": None}}, "must be absent"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id.*got '2'"),
        ({"eos_token_id": [1, -2]}, "eos_token_id must be"),
        ({"model_type": "gpt2"}, "model_type must be one of: llama, mistral, .*, got 'gpt2'"),
        ({"model_type": "gemma"}, "model_type must be one of: .*got 'gemma'"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            r"architectures must be \['LlamaForCausalLM'\]",
        ),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"model_type": None, "architectures": ["GPT2LMHeadModel"]}, "no model_type"),
    ],
)
def test_c32_what_is_not_served_names_key_value_and_limit(changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read(changes)
    assert str(caught.value).startswith("config.json: ")


def test_a_scheme_for_the_kv_cache_alone_leaves_the_weights_as_they_are():
    assert read({"quantization_config": KV_ALONE}) == read({})


def test_a_class_name_alone_is_enough():
    assert read({"model_type": None}).architecture == "llama"


def test_c04_end_ids_are_the_union_of_both_files():
    assert read({"eos_token_id": 3}, {"eos_token_id": [3, 9]}).eos_token_ids == (3, 9)
    assert read({"eos_token_id": [5]}, None).eos_token_ids == (5,)
    assert read({"eos_token_id": None}, {"eos_token_id": 7}).eos_token_ids == (7,)
    with pytest.raises(
        CheckpointError, match=r"generation_config.json beside config.json: eos_token_id"
    ):
        read({}, {"eos_token_id": 1.5})


def test_both_spellings_of_dtype():
    assert read({"torch_dtype": "bfloat16"}).dtype == "bfloat16"
    assert read({"dtype": "float16"}).dtype == "float16"
    assert read({}).dtype is None


def test_a_config_that_is_no_object_is_refused():
    with pytest.raises(CheckpointError, match="must be an object"):
        read_hf_config([1], None, "config.json")  # pyright: ignore[reportArgumentType]
