"""How many devices share the work, and by which axes: what is taken, what is refused."""

import dataclasses

import pytest

from jaxserve import AxisRules, EngineConfig, ParallelConfig
from jaxserve.errors import ConfigError


def test_everything_is_cut_by_one_axis_unless_told_otherwise():
    rules = EngineConfig().parallel.axis_rules
    assert {field.name: rules.names(field.name) for field in dataclasses.fields(rules)} == {
        "heads": ("model",),
        "ffn": ("model",),
        "vocab": ("model",),
    }
    assert rules.mesh_axes == ("model",)


def test_a_rule_may_name_several_axes_or_none():
    rules = AxisRules(heads="x", ffn=["x", "y"], vocab=None)  # type: ignore[arg-type]
    assert rules.ffn == ("x", "y")
    assert rules.names("vocab") == ()
    assert rules.mesh_axes == ("x", "y")
    assert hash(rules) == hash(AxisRules(heads="x", ffn=("x", "y"), vocab=None))


@pytest.mark.parametrize("value", ["", 3, (), ("x", "x"), ("x", 1), {"x": 1}, b"x"])
def test_what_is_no_axis_is_refused(value):
    with pytest.raises(ConfigError, match=r"axis_rules\.ffn must be the name of a mesh axis"):
        AxisRules(ffn=value)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "data_parallel_size"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", 4097])
def test_a_size_is_a_positive_integer(name, value):
    with pytest.raises(ConfigError, match=rf"{name} must be an integer in \[1, 4096\], got"):
        EngineConfig.from_options({name: value})


def test_rules_are_rules():
    with pytest.raises(ConfigError, match="axis_rules must be AxisRules, got 'model'"):
        ParallelConfig(axis_rules="model")  # type: ignore[arg-type]


def test_flat_options_reach_the_branch():
    config = EngineConfig.from_options({"tensor_parallel_size": 4, "axis_rules": AxisRules()})
    assert config.parallel == ParallelConfig(tensor_parallel_size=4)
