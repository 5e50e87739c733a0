"""Packed projections: the same columns in one matrix, the same hidden states, and who asks for them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.params import put_params
from jaxserve.model.attention import AttentionKernel, PagedRows
from jaxserve.model.packed import LayerLayout, is_packed, pack_layer
from jaxserve.model.registry import build_model
from jaxserve.model_config import ModelConfig
from jaxserve.rope_config import RopeConfig
from pallas_kernels.dense.cpu import pack_gated
from pallas_kernels.native.huge_pages import Arena
from pallas_kernels.ragged_paged_attention.layout import KVPages

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=32,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    max_position_embeddings=64,
    tie_word_embeddings=True,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
)
F32 = jnp.dtype("float32")


def random_params(model) -> dict:
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda leaf: (0.3 * rng.standard_normal(leaf.shape)).astype(np.float32),
        model.abstract_params,
    )


@pytest.mark.parametrize(("backend", "num_tokens"), [("cpu", 1), ("cpu", 3), ("xla", 12)])
def test_packed_layers_give_the_same_hidden_states(backend, num_tokens):
    model = build_model(CONFIG, F32, AttentionKernel(backend=backend))
    params = random_params(model)
    plain = put_params(params, model.abstract_params)
    layout = LayerLayout.of(CONFIG)
    packed = put_params(params, model.abstract_params, pack=layout)
    assert not is_packed(plain["layers"][0])
    assert is_packed(packed["layers"][0])
    pool_layout = "head_major" if backend == "cpu" else "split"
    single = int(num_tokens == 1)
    rows = PagedRows(
        kv_lens=jnp.array([num_tokens], jnp.int32),
        page_table=jnp.array([1], jnp.int32),
        kv_starts=jnp.zeros(1, jnp.int32),
        cu_q_lens=jnp.array([0, num_tokens], jnp.int32),
        ranges=jnp.array([single, single, 1], jnp.int32),
    )
    x = model.embed(plain["embed"], jnp.arange(num_tokens, dtype=jnp.int32))

    def run(served):
        pages = [KVPages.zeros(pool_layout, 2, 16, 2, 16, F32)] * 2
        positions = jnp.arange(num_tokens, dtype=jnp.int32)
        return np.asarray(model.layers(model.layer_params(served), pages, x, positions, rows)[0])

    expected = run(plain)
    assert np.abs(run(packed) - expected).max() < 1e-5
    swapped = {**params["layers"][0]["attn"], "q": params["layers"][0]["attn"]["q"]}
    swapped["k"], swapped["v"] = swapped["v"], swapped["k"]
    params["layers"][0] = {**params["layers"][0], "attn": swapped}
    other = put_params(params, model.abstract_params, pack=layout)
    assert np.abs(run(other) - expected).max() > 1e-3


def test_only_the_native_path_asks_for_it():
    native = build_model(CONFIG, F32, AttentionKernel(backend="cpu"))
    assert native.packs
    assert all(is_packed(layer) for layer in native.served_params["layers"].values())
    portable = build_model(CONFIG, F32, AttentionKernel(backend="xla"))
    assert not portable.packs
    assert portable.served_params is portable.abstract_params
    mesh = jax.sharding.AbstractMesh((2,), ("model",))
    assert not AttentionKernel(backend="cpu", mesh=mesh).is_native


def test_what_is_served_is_what_is_put_and_no_array_of_the_caller_is_used_in_place():
    model = build_model(CONFIG, F32, AttentionKernel(backend="cpu"))
    params = random_params(model)
    params["layers"][0]["attn"]["k"]["kernel"] = np.asfortranarray(
        params["layers"][0]["attn"]["k"]["kernel"]
    )
    served = put_params(params, model.abstract_params, own=True, pack=model.layout)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), served)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), model.served_params)
    before = jax.tree.map(np.array, served)
    for leaf in jax.tree.leaves(params):
        leaf[...] = 7
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.tree.map(np.asarray, served)))


@pytest.mark.parametrize("consume", [False, True])
def test_columns_stand_side_by_side_in_order_in_one_array(consume):
    config = dataclasses.replace(CONFIG, qk_norm=True)
    model = build_model(config, F32, AttentionKernel(backend="cpu"))
    assert model.layout is not None
    layer = random_params(model)["layers"][1]
    attn, mlp = dict(layer["attn"]), dict(layer["mlp"])
    packed = pack_layer(layer, model.layout, Arena(), consume=consume)
    assert packed.keys() == {"packed"}
    assert packed["packed"].shape == (model.layout.size,)
    found = {name: piece.view(packed["packed"]) for name, piece in model.layout.pieces}
    assert all(piece.at % 16 == 0 for _, piece in model.layout.pieces)
    norms = {name: found.pop(f"{name}_norm") for name in ("input", "post_attn", "q", "k")}
    for name, values in norms.items():
        tree = attn if name in "qk" else layer
        assert np.array_equal(values, tree[f"{name}_norm"]["scale"])
    kernels = (mlp["gate"]["kernel"], mlp["up"]["kernel"])
    assert np.array_equal(found.pop("gate_up"), pack_gated(*kernels))
    biases = [mlp["gate"]["bias"], mlp["up"]["bias"]]
    assert np.array_equal(found.pop("gate_up_bias"), np.concatenate(biases))
    expected = {"qkv": [attn[part] for part in "qkv"], "o": [attn["o"]], "down": [mlp["down"]]}
    for name, parts in expected.items():
        kernel = np.concatenate([part["kernel"] for part in parts], axis=1)
        flat = found.pop(name).transpose(1, 0, 2).reshape(len(kernel), -1)
        assert np.array_equal(flat[:, : kernel.shape[1]], kernel)
        bias = np.concatenate([part["bias"] for part in parts])
        assert np.array_equal(found.pop(f"{name}_bias"), bias)
    assert not found
    is_left = {"q", "k", "v", "o"} & layer["attn"].keys()
    assert is_left == (set() if consume else {"q", "k", "v", "o"})


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_packed_too(tied):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied, vocab_size=70)
    model = build_model(config, F32, AttentionKernel(backend="cpu"))
    params = random_params(model)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((5, 24), np.float32))
    plain = put_params(params, model.abstract_params)
    packed = put_params(params, model.abstract_params, pack=model.layout)
    assert is_packed(packed["lm_head"])
    assert np.array_equal(packed["embed"]["embedding"], params["embed"]["embedding"])
    expected = np.asarray(model.logits(model.head_params(plain), hidden))
    found = np.asarray(model.logits(model.head_params(packed), hidden))
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(expected).max() > 0.1
