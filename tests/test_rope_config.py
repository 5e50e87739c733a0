"""RopeConfig: every type has what its frequencies need, or it is refused."""

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.rope_config import RopeConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "foo"}, "rope_type must be one of default, linear, .*got 'foo'"),
        ({"rope_type": "yarn"}, "'yarn' needs original_max_position_embeddings, got None"),
        ({"rope_type": "llama3"}, "'llama3' needs original_max_position_embeddings, got None"),
        (
            {"rope_type": "dynamic", "original_max_position_embeddings": 8},
            "rope_type 'dynamic' needs context_len, got None",
        ),
        ({"theta": 0.0}, "rope theta must be a finite number > 0, got 0.0"),
        ({"theta": 1e-320}, "rope theta must be in .* as float32 is, got 1e-320"),
        ({"theta": 10**400}, "rope theta must be a finite number > 0, got an integer of 1329 bits"),
        ({"factor": 1e30}, r"rope factor must be <= 2147483647, got 1e\+30"),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 8, "theta": 1.0},
            "rope theta must be > 1 for rope_type 'yarn', got 1.0",
        ),
        (
            {"original_max_position_embeddings": 0},
            r"must be an integer in \[1, 2147483647\], got 0",
        ),
        ({"attention_factor": float("inf")}, "rope attention_factor must be a finite number"),
        ({"partial_rotary_factor": 0.0}, r"partial_rotary_factor must be in \(0, 1\], got 0.0"),
        ({"long_factors": (1.0, -1.0)}, "rope long_factors must be a finite number > 0, got -1.0"),
    ],
)
def test_fields_out_of_range_are_refused(fields, message):
    with pytest.raises(CheckpointError, match=message):
        RopeConfig(**fields)


def test_rotary_dim():
    assert RopeConfig().rotary_dim(64) == 64
    assert RopeConfig(partial_rotary_factor=0.75).rotary_dim(128) == 96
    with pytest.raises(CheckpointError, match="head_dim must be even"):
        RopeConfig().rotary_dim(9)
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor \(0.1\) must be even.*got 1"):
        RopeConfig(partial_rotary_factor=0.1).rotary_dim(16)
    dynamic = RopeConfig(rope_type="dynamic", original_max_position_embeddings=8, context_len=8)
    with pytest.raises(CheckpointError, match="needs head_dim >= 4, got 2"):
        dynamic.rotary_dim(2)


def test_only_types_that_depend_on_the_text_look_at_the_context():
    assert RopeConfig().at_context(9) == RopeConfig()
