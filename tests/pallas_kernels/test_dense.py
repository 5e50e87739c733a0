"""Dense products of few rows in C++: right numbers, the same bits beside any rows, and that the model
calls them for these numbers of rows and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.model.layers import Linear, project
from pallas_kernels.dense.cpu import ROWS, TARGET, dense

call = jax.jit(lambda x, *weights: dense(x, weights))
SIZES = [(576, (576, 192, 192)), (1536, (576,)), (37, (5, 70)), (7, (16, 1600)), (1, (33,))]


def operands(num_rows: int, size: int, columns: tuple[int, ...]) -> tuple[np.ndarray, list]:
    rng = np.random.default_rng(size)
    weights = [rng.standard_normal((size, n), np.float32) for n in columns]
    return rng.standard_normal((num_rows, size), np.float32), weights


@pytest.mark.parametrize("num_rows", [*range(1, 10), 17])
@pytest.mark.parametrize(("size", "columns"), SIZES)
def test_each_is_the_product_and_a_row_is_the_same_beside_any_rows(num_rows, size, columns):
    x, weights = operands(num_rows, size, columns)
    found = [np.asarray(y) for y in call(x, *weights)]
    for y, weight in zip(found, weights, strict=True):
        exact = x.astype(np.float64) @ weight.astype(np.float64)
        bound = np.abs(x).astype(np.float64) @ np.abs(weight)  # of a sum in order: size roundings
        assert (np.abs(y - exact) <= 2.0**-24 * (size + 1) * bound).all()
    for row in (0, num_rows - 1):
        alone = call(x[row : row + 1], *weights)
        for y, own in zip(found, alone, strict=True):
            assert np.array_equal(np.asarray(own)[0], y[row])


def test_a_weight_does_not_depend_on_those_beside_it():
    x, weights = operands(4, 576, (576, 192, 192))
    together = call(x, *weights)
    for y, weight in zip(together, weights, strict=True):
        assert np.array_equal(np.asarray(y), np.asarray(call(x, weight)[0]))


def test_not_a_number_stays_in_its_row_or_column():
    x, weights = operands(7, 64, (130,))
    x[3, 5], weights[0][7, 129] = np.nan, np.inf
    found = np.isfinite(np.asarray(call(x, *weights)[0]))
    expected = np.ones((7, 130), bool)
    expected[3], expected[:, 129] = False, False
    assert np.array_equal(found, expected)


def test_shapes_that_do_not_fit_are_refused():
    x, weights = operands(2, 64, (130, 64))
    weights[1] = weights[1][:60]
    with pytest.raises(jax.errors.JaxRuntimeError, match="weight 1 does not fit x"):
        call(x, *weights)[0].block_until_ready()


@pytest.mark.parametrize("use_bias", [False, True])
def test_projections_take_it_for_few_rows_on_the_native_path_alone(use_bias):
    layers = [Linear(24, n, jnp.dtype("float32"), use_bias=use_bias) for n in (48, 20)]
    rng = np.random.default_rng(0)
    for layer in layers:
        for _, leaf in nnx.iter_graph(layer):
            if isinstance(leaf, nnx.Param):
                leaf[...] = jnp.asarray(rng.standard_normal(leaf.shape, np.float32))

    def text(num_rows, is_native):
        x = jnp.ones((num_rows, 24))
        return jax.jit(lambda x: project(x, layers, is_native=is_native)).lower(x).as_text()

    for num_rows in (1, ROWS[0], ROWS[-1], ROWS[-1] + 1):
        assert text(num_rows, True).count(TARGET) == (num_rows in ROWS)
        assert TARGET not in text(num_rows, False)
    x = jnp.asarray(rng.standard_normal((3, 24), np.float32))
    plain, native = (project(x, layers, is_native=one) for one in (False, True))
    for one, other in zip(plain, native, strict=True):
        assert np.abs(np.asarray(one) - np.asarray(other)).max() < 1e-5
        assert np.abs(np.asarray(one)).max() > 1
