"""Params on a caller's own devices: each has its part, and nobody holds more than that."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxserve
from jaxserve.errors import ConfigError
from jaxserve.weights.convert import convert
from jaxserve.weights.loader import load_params, open_checkpoint
from tests import checkpoints
from tests.weights.trees import assert_trees_equal

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with one model in two formats."""
    folder = tmp_path_factory.mktemp("models")
    source = checkpoints.make_random_llama(folder / "safetensors", CONFIG)
    convert(source, folder / "orbax", format="orbax")
    return folder


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_on_one_device(models, format):
    expected, config = load_params(open_checkpoint(models / format), np.float32)
    params, found = jaxserve.restore_params(models / format)
    assert found == config
    assert_trees_equal(params, expected)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    half, _ = jaxserve.restore_params(models / format, dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(half)} == {"bfloat16"}
    with pytest.raises(
        ConfigError, match="dtype must be one of auto, float32, bfloat16, got 'int8'"
    ):
        jaxserve.restore_params(models / format, dtype="int8")


# Four devices; what each of them gets of a matrix, and how large the arrays are that the host makes.
SHARDED = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxserve import restore_params
from jaxserve.weights import param_stream
from jaxserve.weights.loader import load_params, open_checkpoint

made = []
real = param_stream.aligned_empty
def counted(shape, dtype):
    made.append(int(np.prod(shape)))
    return real(shape, dtype)
param_stream.aligned_empty = counted
if sys.argv[1].endswith("orbax"):
    from jaxserve.weights import orbax
    orbax.aligned_empty = counted
mesh = Mesh(np.array(jax.devices()), ("model",))

def sharding_of(path):
    if path[-1] == "scale":
        return NamedSharding(mesh, P())
    if path[-2] in ("k", "v"):
        return None
    columns = path[-2] in ("q", "gate", "up", "lm_head")
    return NamedSharding(mesh, P(None, "model") if columns else P("model", None))

params, _ = restore_params(sys.argv[1], sharding_of=sharding_of)
most = max(made)
expected, _ = load_params(open_checkpoint(sys.argv[1]), np.float32)
jax.tree.map(np.testing.assert_array_equal, params, expected)
layer = params["layers"][1]
shapes = [list(s.data.shape) for s in layer["mlp"]["gate"]["kernel"].addressable_shards]
others = [len(layer["attn"]["k"]["kernel"].devices()), len(params["norm"]["scale"].devices())]
print(json.dumps({"shapes": shapes, "others": others, "most": most}))
"""


@pytest.mark.parametrize(("format", "most"), [("orbax", 64 * 32), ("safetensors", 96 * 64)])
def test_on_a_mesh_each_device_gets_its_part(models, format, most):
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, str(models / format)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["shapes"] == [[64, 20]] * 4
    assert found["others"] == [1, 4]
    assert found["most"] == most  # of Orbax a k or v, which stay whole; else the embedding
