"""The forward pass of a training loop: transformers' logits, gradients, and nothing leaks between rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.model.training import full_forward, init_params
from jaxserve.weights.loader import load_params, open_checkpoint
from tests.families import CASES

ATOL = 1e-4


def model_of(name, directory):
    return load_params(open_checkpoint(CASES[name].write(directory)), np.float32)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name, tmp_path):
    case = CASES[name]
    params, config = model_of(name, tmp_path)
    config = config.at_context(len(case.token_ids))  # what some ropes depend on
    found = full_forward(params, jnp.asarray([case.token_ids]), model_config=config)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found[0], case.logits, atol=ATOL)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return model_of("llama", tmp_path_factory.mktemp("llama"))


def test_rows_are_alone_and_what_stands_behind_their_end_reaches_nothing(llama):
    params, config = llama
    ids = np.asarray(CASES["llama"].token_ids[:20])
    other = ids[::-1]
    padded = np.where(np.arange(20) < 9, ids, 1)
    logits = full_forward(params, jnp.asarray([ids, other, padded]), model_config=config)
    alone = full_forward(params, jnp.asarray([ids]), model_config=config)
    np.testing.assert_allclose(logits[0], alone[0], atol=ATOL)
    np.testing.assert_allclose(logits[2, :9], logits[0, :9], atol=ATOL)
    assert np.abs(np.asarray(logits[2, 9:] - logits[0, 9:])).max() > 0.01  # control


@pytest.mark.parametrize(
    ("token_ids", "found"),
    [
        (np.arange(3), r"got int32\[3\]"),
        (np.ones((1, 3), np.float32), r"got float32\[1, 3\]"),
    ],
)
def test_what_are_no_token_ids_is_refused(llama, token_ids, found):
    params, config = llama
    with pytest.raises(
        ConfigError, match=r"token_ids must be integers of shape \[B, T\], " + found
    ):
        full_forward(params, token_ids, model_config=config)


def test_gradients_are_those_of_differences(llama):
    params, config = llama
    ids = jnp.asarray([CASES["llama"].token_ids[:8]])

    @jax.jit
    def loss(params):
        logprobs = jax.nn.log_softmax(full_forward(params, ids, model_config=config))
        return -jnp.take_along_axis(logprobs[:, :-1], ids[:, 1:, None], axis=-1).mean()

    gradients = jax.grad(loss)(params)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradients))
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), params)
    step = 1e-3
    sides = [
        loss(
            jax.tree.map(lambda p, d, side=side: p + np.float32(side * step) * d, params, direction)
        )
        for side in (1, -1)
    ]
    slope = sum(
        float(jnp.vdot(g, d))
        for g, d in zip(jax.tree.leaves(gradients), jax.tree.leaves(direction), strict=True)
    )
    assert float(sides[0] - sides[1]) / (2 * step) == pytest.approx(slope, rel=0.02)
    assert abs(slope) > 0.1  # control


def test_params_to_begin_with(llama):
    params, config = llama
    made = init_params(config, jax.random.key(1), scale=0.5)
    assert jax.tree.map(np.shape, made) == jax.tree.map(np.shape, params)
    layer = made["layers"][1]
    assert float(jnp.std(layer["mlp"]["up"]["kernel"])) == pytest.approx(0.5, rel=0.1)
    assert (layer["input_norm"]["scale"] == 1).all()
    assert not jnp.array_equal(
        layer["attn"]["q"]["kernel"], made["layers"][0]["attn"]["q"]["kernel"]
    )
    again = init_params(config, jax.random.key(1), dtype=jnp.bfloat16, scale=0.5)
    assert again["norm"]["scale"].dtype == jnp.bfloat16
