"""What of a model is compiled for absent devices, and how a config travels to the process that does it."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from jaxserve.config import AxisRules
from jaxserve.device.aot import first_layers, shared_config
from jaxserve.device.aot_worker import config_from
from jaxserve.errors import ConfigError
from jaxserve.model import sharding
from jaxserve.model.attention import AttentionKernel
from jaxserve.model.registry import build_model
from jaxserve.plan.model_table import CONFIGS
from jaxserve.plan.models import ModelSpec


@pytest.mark.parametrize("name", ["llama-3-8b", "smollm3-3b", "phi-3-mini"])
def test_a_config_travels_as_json(name):
    sent = json.loads(json.dumps(dataclasses.asdict(CONFIGS[name])))
    assert config_from(sent) == CONFIGS[name]


def test_the_first_layers_keep_what_is_theirs():
    few = first_layers(CONFIGS["smollm3-3b"], 5)
    assert few.num_layers == 5
    assert few.rope_layers == (True, True, True, False, True)
    assert few.layer_kinds == CONFIGS["smollm3-3b"].layer_kinds[:5]
    assert first_layers(CONFIGS["llama-3-8b"], 2).layer_kinds == few.layer_kinds[:2]


def test_more_devices_than_kv_heads_hold_each_several_times():
    llama = CONFIGS["llama-3-70b"]
    assert shared_config(llama, 8) == llama
    assert shared_config(llama, 16) == dataclasses.replace(llama, num_kv_heads=16)
    with pytest.raises(ConfigError, match="num_heads=64: 3 devices cannot share it"):
        shared_config(llama, 3)


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [("llama-3-70b", 8), ("llama-3-70b", 16), ("qwen2.5-7b", 4), ("qwen3-0.6b", 2)],
)
def test_a_plan_counts_the_weights_that_a_device_holds(name, num_devices):
    """Every tensor, cut as the engine cuts it."""
    whole = dataclasses.replace(CONFIGS[name], vocab_size=CONFIGS[name].vocab_size - 1)
    config = shared_config(whole, num_devices)
    model = build_model(config, jnp.dtype("bfloat16"), AttentionKernel(backend="xla"))
    mesh = AbstractMesh((num_devices,), ("model",))
    params = model.abstract_params

    def size(leaf, spec) -> int:
        return math.prod(NamedSharding(mesh, spec).shard_shape(leaf.shape))

    parts = jax.tree.map(size, params, sharding.param_specs(params, AxisRules.over("model")))
    assert (
        sum(jax.tree.leaves(parts))
        == ModelSpec.from_config(whole).of_one_chip(num_devices).num_params
    )
