"""The model against the NumPy oracle: head shapes, biases, rope types, tied and untied heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.model.attention import AttentionKernel, PagedRows
from jaxserve.model.registry import build_model
from jaxserve.weights.loader import load_params, open_checkpoint
from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention.layout import KVPages
from tests import numpy_llama
from tests.checkpoints import make_random_llama


def full_forward(path, token_ids, *, start=0, dtype="float32", backend="reference", page_size=16):
    """Logits f32[T, V] of one row through the paged model in a single call, positions from `start`."""
    checkpoint = open_checkpoint(path)
    params, config = load_params(checkpoint, jnp.dtype(dtype))
    model = build_model(config, jnp.dtype(dtype), AttentionKernel(backend=backend))
    num_tokens = len(token_ids)
    num_pages = -(-num_tokens // page_size)
    pool = (num_pages + 1, page_size, config.num_kv_heads, config.head_dim, dtype)
    layout = dispatch.layout_of(backend)
    pages = [KVPages.zeros(layout, *pool) for _ in range(config.num_layers)]
    rows = PagedRows(
        kv_lens=jnp.array([num_tokens], jnp.int32),
        page_table=jnp.arange(1, num_pages + 1, dtype=jnp.int32),
        kv_starts=jnp.zeros(1, jnp.int32),
        cu_q_lens=jnp.array([0, num_tokens], jnp.int32),
        ranges=jnp.array([0, 0, 1], jnp.int32),
    )

    @jax.jit
    def run(params, pages, ids, positions):
        x = model.embed(params["embed"], ids)
        x, _ = model.layers(model.layer_params(params), pages, x, positions, rows)
        return model.logits(model.head_params(params), x)

    positions = jnp.arange(start, start + num_tokens, dtype=jnp.int32)
    return np.asarray(run(params, pages, jnp.asarray(token_ids, jnp.int32), positions))


IDS = np.random.default_rng(1).integers(0, 96, 24).tolist()

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "9_3_heads_of_32": {"hidden_size": 96, "head_dim": 32},
    "head_dim_null": {"hidden_size": 90, "head_dim": None},
    "mqa": {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24},
    "mha": {"hidden_size": 96, "num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 12},
    "kv_heads_absent": {"num_attention_heads": 3, "num_key_value_heads": None},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear_rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3_rope": {"rope_scaling": LLAMA3},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_c32_logits_equal_the_oracle(name, tmp_path):
    path = make_random_llama(tmp_path, CONFIGS[name])
    logits = full_forward(path, IDS)
    expected = numpy_llama.forward(path, IDS)
    assert np.abs(logits - expected).max() < 1e-4
    # The control: the same weights with another rope base are told apart by this comparison.
    other = make_random_llama(tmp_path / "other", {**CONFIGS[name], "rope_theta": 500.0})
    assert np.abs(logits - numpy_llama.forward(other, IDS)).max() > 1e-3


def test_production_attention_gives_the_same_logits(tmp_path):
    path = make_random_llama(tmp_path)
    plain = full_forward(path, IDS)
    assert np.abs(full_forward(path, IDS, backend="xla") - plain).max() < 1e-5


def test_bfloat16_stays_near_float32(tmp_path):
    path = make_random_llama(tmp_path)
    wide, narrow = full_forward(path, IDS), full_forward(path, IDS, dtype="bfloat16")
    assert narrow.dtype == np.float32
    assert 0 < np.abs(wide - narrow).mean() < 0.05


def test_float32_products_ask_for_full_precision(tmp_path):
    """TPU and GPU would otherwise multiply float32 in fewer bits; on CPU only the text shows it."""
    config = open_checkpoint(make_random_llama(tmp_path)).config
    model = build_model(config, jnp.dtype("float32"), AttentionKernel(backend="xla"))
    params = model.abstract_params
    x = jax.ShapeDtypeStruct((4, config.hidden_size), jnp.float32)
    text = jax.jit(model.logits).lower(model.head_params(params), x).as_text()
    pages = [KVPages.abstract(dispatch.layout_of("xla"), 4, 16, 3, 16, "float32")] * 2
    rows = PagedRows(
        kv_lens=jax.ShapeDtypeStruct((2,), jnp.int32),
        page_table=jax.ShapeDtypeStruct((6,), jnp.int32),
        kv_starts=jax.ShapeDtypeStruct((2,), jnp.int32),
        cu_q_lens=jax.ShapeDtypeStruct((3,), jnp.int32),
        ranges=jax.ShapeDtypeStruct((3,), jnp.int32),
    )
    positions = jax.ShapeDtypeStruct((4,), jnp.int32)
    layers = jax.jit(model.layers).lower(model.layer_params(params), pages, x, positions, rows)
    for one in (text, layers.as_text()):
        products = [line for line in one.splitlines() if "stablehlo.dot_general" in line]
        assert products
        assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_tied_head_never_transposes_the_embedding():
    """With one row, `x @ embedding.T` would transpose the whole embedding in every step on CPU."""
    vocab, hidden = 4096, 64
    embedding = jax.ShapeDtypeStruct((vocab, hidden), jnp.float32)
    row = jax.ShapeDtypeStruct((1, hidden), jnp.float32)

    def transposes(function) -> bool:
        text = jax.jit(function).lower(embedding, row).compile().as_text()
        lines = [line.split("=", 1)[1] for line in text.splitlines() if "=" in line]
        shapes = (f"f32[{hidden},{vocab}]", f"f32[{vocab},{hidden}]")
        made = [line for line in lines if line.strip().startswith(shapes)]
        return any("transpose(" in line or "copy(" in line or "fusion(" in line for line in made)

    def tied(embedding, row):
        from flax import nnx

        from jaxserve.model.layers import Embedding

        graph, _ = nnx.split(nnx.eval_shape(lambda: Embedding(vocab, hidden, jnp.dtype("float32"))))
        return nnx.merge(graph, {"embedding": embedding}).attend(row)

    assert not transposes(tied)
    assert transposes(lambda embedding, row: row @ embedding.T), (
        "the control no longer shows the trap"
    )
