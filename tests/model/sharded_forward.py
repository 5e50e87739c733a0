"""Prints, as JSON, how far a forward shared by four devices is from that of one: run by test_sharding.

The caller's environment makes the CPU four devices, which must be so before jax is imported.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import AxisRules
from jaxserve.device.step import select_rows
from jaxserve.model import sharding
from jaxserve.model.attention import AttentionKernel, PagedRows
from jaxserve.model.registry import build_model
from jaxserve.model_config import ModelConfig
from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention.layout import KVPages

AXIS = "model"
LAYERS = 2
SHAPES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_layers": LAYERS,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
# Two rows of one token each, a chunk of six, padding.
KV_LENS, CU_Q_LENS, PAGE, PAGES_PER_ROW, TOKENS = [9, 4, 6], [0, 1, 2, 8], 8, 2, 10


def random_like(tree, rng):
    return jax.tree.map(lambda a: rng.normal(0, 0.3, a.shape).astype(np.float32), tree)


def forward(backend, config, mesh):
    """(logits f32[3, V], canonical pages of every layer, all-reduces in the layers)."""
    kernel = AttentionKernel(backend=backend, mesh=mesh, axis=AXIS)
    model = build_model(config, jnp.dtype("float32"), kernel)
    rng = np.random.default_rng(0)
    params = random_like(model.abstract_params, rng)
    layout = dispatch.layout_of(backend)
    pool = (len(KV_LENS) * PAGES_PER_ROW + 1, PAGE, config.num_kv_heads, config.head_dim)
    pages = random_like([KVPages.abstract(layout, *pool, "float32")] * LAYERS, rng)
    if mesh is not None:
        specs = sharding.param_specs(params, AxisRules.over(AXIS))
        params = jax.device_put(params, sharding.shardings(specs, mesh))
        cut = jax.sharding.NamedSharding(mesh, sharding.pages_spec(layout, AXIS))
        pages = jax.device_put(pages, cut)
    rows = PagedRows(
        kv_lens=jnp.array(KV_LENS, jnp.int32),
        page_table=jnp.arange(1, pool[0], dtype=jnp.int32),
        kv_starts=jnp.zeros(3, jnp.int32),
        cu_q_lens=jnp.array(CU_Q_LENS, jnp.int32),
        ranges=jnp.array([2, 2, 3], jnp.int32),
    )
    positions = jnp.array([8, 3, 0, 1, 2, 3, 4, 5, 0, 0], jnp.int32)
    ids = jnp.asarray(rng.integers(0, 96, TOKENS), jnp.int32)
    layers = jax.jit(model.layers, donate_argnums=(1,))
    x = jax.jit(model.embed)(params["embed"], ids)
    arguments = (model.layer_params(params), pages, x, positions, rows)
    text = layers.lower(*arguments).compile().as_text()
    x, pages = layers(*arguments)
    hidden = jax.jit(select_rows)(x, jnp.array([0, 1, 7], jnp.int32))
    logits = jax.jit(model.logits)(model.head_params(params), hidden)
    every = jnp.arange(1, pool[0], dtype=jnp.int32)
    canonical = [np.asarray(kv.gather(every)) for kv in pages]
    return np.asarray(logits), canonical, len(re.findall(r" all-reduce(?:-start)?\(", text))


def compare(backend: str, **options) -> dict:
    """Largest differences between one device and four, and what four exchange."""
    config = ModelConfig(**(SHAPES | options))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), (AXIS,))
    logits, pages, none = forward(backend, config, None)
    shared_logits, shared_pages, exchanged = forward(backend, config, mesh)
    return {
        "logits": float(np.abs(logits - shared_logits).max()),
        "pages": float(max(np.abs(a - b).max() for a, b in zip(pages, shared_pages, strict=True))),
        "scale": float(np.abs(logits).max()),
        "all_reduces": exchanged - none,
    }


if __name__ == "__main__":
    assert jax.device_count() == 4, jax.devices()
    biases = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    results = {
        "xla": compare("xla"),
        "biases, tied": compare("xla", **biases),
        "head_major": compare("reference"),
    }
    print(json.dumps(results))
