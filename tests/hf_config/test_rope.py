"""Rope types beyond the plain ones: which keys each reads, what stands in for those that are absent."""

import math

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.hf_config.read import read_hf_config
from jaxserve.rope_config import RopeConfig

SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
SHORT, LONG = [1.0] * 8, [4.0] * 8


def read(scaling: dict, model_type: str = "llama", **changes) -> RopeConfig:
    values = SHAPE | {"model_type": model_type, "rope_scaling": scaling} | changes
    return read_hf_config(values, None, "config.json").rope


def longrope(**changes) -> dict:
    return {"type": "longrope", "short_factor": SHORT, "long_factor": LONG} | changes


def test_yarn():
    given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    rope = read(given)
    assert (rope.factor, rope.original_max_position_embeddings) == (4.0, 1024)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert read(given | {"attention_factor": 1.5}).attention_factor == 1.5
    weighed = read(given | {"mscale": 1.0, "mscale_all_dim": 0.5}).attention_factor
    assert weighed == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    # transformers takes mscale for nothing where it stands alone
    assert read(given | {"mscale": 2.0}).attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    # and the ratio of the contexts where no factor is given
    assert read({"type": "yarn", "original_max_position_embeddings": 512}).factor == 8.0
    assert read({"type": "yarn", "factor": 2}).original_max_position_embeddings == 4096


def test_dynamic_grows_from_max_position_embeddings():
    rope = read({"type": "dynamic", "factor": 3.0})
    assert (rope.factor, rope.original_max_position_embeddings, rope.context_len) == (3, 4096, 4096)
    assert rope.at_context(8192).context_len == 8192


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_longrope_under_the_names_that_files_of_phi_3_give_it(name):
    rope = read(longrope(type=name), "phi3", original_max_position_embeddings=1024)
    assert rope.rope_type == "longrope"
    assert (rope.short_factors, rope.long_factors) == (tuple(SHORT), tuple(LONG))
    assert (rope.original_max_position_embeddings, rope.context_len) == (1024, 4096)
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1024)))


def test_longrope_defaults():
    assert read(longrope(), "phi3").original_max_position_embeddings == 4096
    assert read(longrope(), "phi3").attention_factor == 1.0
    given = longrope(factor=16.0, original_max_position_embeddings=2048)
    expected = math.sqrt(1 + math.log(16) / math.log(2048))
    assert read(given).attention_factor == pytest.approx(expected)


def test_a_part_of_each_head():
    whole = {"model_type": "phi3", **SHAPE}
    rope = read_hf_config(whole | {"partial_rotary_factor": 0.5}, None, "config.json").rope
    assert (rope.partial_rotary_factor, rope.rotary_dim(16)) == (0.5, 8)
    inside = {"rope_type": "default", "partial_rotary_factor": 0.25}
    assert read_hf_config(whole | {"rope_parameters": inside}, None, "c").rope.rotary_dim(16) == 4


@pytest.mark.parametrize(
    ("scaling", "changes", "message"),
    [
        ({"type": "dynamic"}, {}, "rope_scaling.factor must be a finite number, got None"),
        (
            {"type": "dynamic", "factor": 2, "original_max_position_embeddings": 64},
            {},
            r"must be max_position_embeddings \(4096\) for rope_type 'dynamic', got 64",
        ),
        ({"type": "yarn", "factor": -1}, {}, "rope factor must be a finite number > 0, got -1.0"),
        ({"type": "yarn", "factor": 2, "beta_slow": 64}, {}, "beta_slow must be <= beta_fast"),
        ({"type": "yarn", "factor": 2, "truncate": 1}, {}, "truncate must be true or false"),
        ({"type": "linear", "factor": 2, "beta_fast": 1}, {}, "beta_fast must be absent for rope"),
        ({"type": "yarn", "factor": 2, "short_factor": SHORT}, {}, "short_factor must be absent"),
        (longrope(short_factor=None), {}, "short_factor must be a list of finite numbers > 0"),
        (longrope(long_factor=[0.0] * 8), {}, "long_factor must be a list of finite numbers > 0"),
        (longrope(long_factor=[1.0] * 7), {}, "long_factors must be 8 numbers.*got 7"),
        (
            longrope(original_max_position_embeddings=64),
            {"original_max_position_embeddings": 128},
            r"must be the same as outside of it \(128\), got 64",
        ),
        ({"type": "su", "factor": 2}, {}, "rope_scaling.type must be one of"),
        ({}, {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0, got 0.5"),
        (
            {},
            {"partial_rotary_factor": 0.2, "model_type": "phi3"},
            r"head_dim \* partial_rotary_factor \(0.2\) must be even",
        ),
        (
            {},
            {"partial_rotary_factor": 1.5, "model_type": "phi3"},
            r"partial_rotary_factor must be in \(0, 1\], got 1.5",
        ),
    ],
)
def test_what_is_not_computed_is_refused(scaling, changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read(scaling, **changes)
    assert str(caught.value).startswith("config.json: ")
