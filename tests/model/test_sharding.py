"""A model shared by devices: how params and pages are cut, what is refused, and that nothing changes.

Four devices exist only in the subprocess of one test.
"""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxserve.config import AxisRules
from jaxserve.errors import ConfigError
from jaxserve.model import sharding
from jaxserve.model.attention import AttentionKernel, PagedRows
from jaxserve.model.registry import build_model
from jaxserve.model_config import ModelConfig
from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention.layout import LAYOUTS, KVPages

SHAPES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
DTYPE = jnp.dtype("float32")


@pytest.fixture(scope="module")
def shared(repository):
    """What four devices compute beside one, from a process that has four."""
    flags = "--xla_force_host_platform_device_count=4"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "PYTHONPATH": str(repository),
    }
    command = [sys.executable, "-m", "tests.model.sharded_forward"]
    done = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", ["xla", "biases, tied", "head_major"])
def test_four_devices_compute_what_one_does(shared, case):
    found = shared[case]
    assert found["logits"] <= 1e-5 * max(1, found["scale"])
    assert found["pages"] <= 1e-5
    assert found["scale"] > 0.1  # there is something to compare


@pytest.mark.parametrize("case", ["xla", "biases, tied", "head_major"])
def test_a_layer_exchanges_two_all_reduces(shared, case):
    assert shared[case]["all_reduces"] == 2 * SHAPES["num_layers"]


def make_model(kernel=None, **options):
    config = ModelConfig(**(SHAPES | options))
    return build_model(config, DTYPE, kernel or AttentionKernel(backend="xla"))


def test_projections_are_cut_by_columns_then_by_rows():
    params = make_model(qkv_bias=True, o_bias=True, mlp_bias=True).abstract_params
    specs = sharding.param_specs(params, AxisRules())
    block = specs["layers"][1]
    for name in ("q", "k", "v"):
        assert block["attn"][name] == {"kernel": P(None, "model"), "bias": P("model")}
    for name in ("gate", "up"):
        assert block["mlp"][name] == {"kernel": P(None, "model"), "bias": P("model")}
    assert block["attn"]["o"] == {"kernel": P("model", None), "bias": P()}
    assert block["mlp"]["down"] == {"kernel": P("model", None), "bias": P()}
    assert block["input_norm"] == {"scale": P()}
    assert specs["norm"] == {"scale": P()}
    assert specs["embed"] == {"embedding": P("model", None)}
    assert specs["lm_head"] == {"kernel": P(None, "model")}


def test_an_unknown_param_is_not_guessed():
    leaf = jax.ShapeDtypeStruct((2, 2), DTYPE)
    with pytest.raises(ValueError, match=r"\['router'\]\['kernel'\]: no rule"):
        sharding.param_specs({"router": {"kernel": leaf}}, AxisRules())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_are_cut_by_head(layout):
    """The cut axis shrinks with the heads and no other does: the number of heads is on it."""
    axis = sharding.pages_spec(layout, "model").index("model")
    few, many = (KVPages.abstract(layout, 5, 16, k, 128, "bfloat16") for k in (2, 8))
    for a, b in zip(few.data, many.data, strict=True):
        assert b.shape[axis] == 4 * a.shape[axis]
        assert a.shape[:axis] + a.shape[axis + 1 :] == b.shape[:axis] + b.shape[axis + 1 :]


def attend_shape(config, kernel):
    """The layers' abstract result: what is refused is refused in tracing."""
    model = make_model(kernel, **config)
    head = (model.config.num_kv_heads, model.config.head_dim)
    pages = [KVPages.abstract(dispatch.layout_of(kernel.backend), 4, 16, *head, "float32")] * 2
    i32 = {
        name: jax.ShapeDtypeStruct((size,), jnp.int32)
        for name, size in [("kv_lens", 2), ("page_table", 6), ("kv_starts", 2), ("cu_q_lens", 3)]
    }
    rows = PagedRows(**i32, ranges=jax.ShapeDtypeStruct((3,), jnp.int32))
    x = jax.ShapeDtypeStruct((4, model.config.hidden_size), DTYPE)
    positions = jax.ShapeDtypeStruct((4,), jnp.int32)
    layer_params = model.layer_params(model.abstract_params)
    return jax.eval_shape(model.layers, layer_params, pages, x, positions, rows)


def mesh(num_devices, axis_type=AxisType.Auto):
    return AbstractMesh((num_devices,), ("model",), axis_types=(axis_type,))


def test_shared_attention_keeps_shapes_and_heads():
    plain = attend_shape({}, AttentionKernel(backend="xla"))
    assert attend_shape({}, AttentionKernel(backend="xla", mesh=mesh(4))) == plain


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="num_kv_heads=4: 3 devices cannot share it"):
        attend_shape({}, AttentionKernel(backend="xla", mesh=mesh(3)))


@pytest.mark.parametrize(
    "kernel",
    [
        AttentionKernel(backend="xla", mesh=mesh(4, AxisType.Explicit)),
        AttentionKernel(backend="xla", mesh=mesh(4), axis="data"),
    ],
)
def test_a_mesh_without_such_an_axis_is_refused(kernel):
    with pytest.raises(ValueError, match=f"axis='{kernel.axis}': must be an Auto axis"):
        attend_shape({}, kernel)


def test_each_logical_axis_is_cut_by_the_mesh_axes_of_its_rule():
    rules = AxisRules(heads="x", ffn=("x", "y"), vocab=None)
    model = make_model(qkv_bias=True, mlp_bias=True)
    specs = sharding.param_specs(model.abstract_params, rules)
    block = specs["layers"][0]
    assert block["attn"]["k"] == {"kernel": P(None, "x"), "bias": P("x")}
    assert block["attn"]["o"]["kernel"] == P("x", None)
    assert block["mlp"]["up"] == {"kernel": P(None, ("x", "y")), "bias": P(("x", "y"))}
    assert block["mlp"]["down"]["kernel"] == P(("x", "y"), None)
    assert specs["embed"]["embedding"] == P(None, None)
    whole = AbstractMesh((2, 3, 5), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
    assert sharding.Shares.of(whole, rules) == sharding.Shares(heads=2, ffn=6, vocab=1)


def even(config, num_devices):
    return sharding.shared_config(config, sharding.Shares.even(num_devices))


def test_what_divides_is_served_as_it_is():
    config = ModelConfig(**SHAPES)
    for num_devices in (1, 2, 4):
        assert even(config, num_devices) == config


def test_kv_heads_are_repeated_and_the_vocabulary_is_filled_up():
    served = even(ModelConfig(**(SHAPES | {"num_kv_heads": 2, "vocab_size": 93})), 4)
    assert (served.num_heads, served.num_kv_heads, served.vocab_size) == (8, 4, 96)


@pytest.mark.parametrize(
    ("changes", "num_devices", "message"),
    [
        ({"num_heads": 6, "num_kv_heads": 2}, 4, "num_heads=6: 4 devices cannot share it"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "num_kv_heads=3: 2 devices cannot share it"),
        ({"intermediate_size": 62}, 4, "intermediate_size=62: 4 devices cannot share it"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(changes, num_devices, message):
    with pytest.raises(ConfigError, match=message):
        even(ModelConfig(**(SHAPES | changes)), num_devices)


@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
def test_each_kv_head_stands_beside_its_copies(library):
    heads = library.arange(2 * 3).reshape(2, 3)  # two heads of three
    kernel = library.stack([heads.reshape(-1)] * 5)
    fitted = sharding.fit_param(kernel, "k", (5, 4 * 3), 3)
    assert isinstance(fitted, type(kernel))
    expected = [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    assert np.array_equal(np.asarray(fitted)[2].reshape(4, 3), expected)
    bias = sharding.fit_param(heads.reshape(-1), "v", (12,), 3)
    assert np.array_equal(np.asarray(bias).reshape(4, 3), expected)
    assert np.array_equal(sharding.repeat_heads(library.arange(2), 4), [0, 0, 1, 1])


def test_the_vocabulary_is_filled_with_zeros():
    embedding, kernel = np.ones((5, 2), np.float32), np.ones((2, 5), np.float32)
    rows = sharding.fit_param(embedding, "embed", (8, 2), 4)
    columns = sharding.fit_param(kernel, "lm_head", (2, 8), 4)
    assert np.array_equal(rows[:5], embedding)
    assert not rows[5:].any()
    assert np.array_equal(columns, rows.T)
    assert sharding.fit_param(embedding, "embed", (5, 2), 4) is embedding


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "num_devices", "fits"),
    [
        (8, 128, "bfloat16", 8, True),  # k and v of one head: a word of two rows
        (8, 128, "float32", 8, True),
        (8, 128, "int8", 4, True),
        (8, 128, "int8", 8, False),  # two rows of a word of four
        (8, 64, "bfloat16", 4, True),
        (8, 64, "bfloat16", 8, False),  # a head is one row of a word of two
        (6, 64, "bfloat16", 2, False),  # three rows
        (8, 256, "int8", 8, True),
    ],
)
def test_a_device_holds_whole_words_of_tpu_pages(heads, head_dim, dtype, num_devices, fits):
    kv = KVPages.abstract("tpu", 4, 32, heads, head_dim, dtype)
    if fits:
        assert sharding.local_kv_heads(kv, num_devices) == heads // num_devices
        return
    with pytest.raises(ValueError, match=f"num_kv_heads={heads}: the .* do not fill whole words"):
        sharding.local_kv_heads(kv, num_devices)
