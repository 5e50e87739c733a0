"""The tied head in C++: right numbers, and the same bits in any batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tied_head.cpu import tied_head


def operands(num_rows: int, size: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(size)
    return (
        rng.standard_normal((num_rows, size), np.float32),
        rng.standard_normal((vocab_size, size), np.float32),
    )


@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 32])
@pytest.mark.parametrize(("size", "vocab_size"), [(576, 203), (48, 512), (37, 1), (5, 70)])
def test_it_is_the_product_and_a_row_is_the_same_in_any_batch(num_rows, size, vocab_size):
    x, embedding = operands(num_rows, size, vocab_size)
    found = np.asarray(jax.jit(tied_head)(jnp.asarray(x), jnp.asarray(embedding)))
    exact = x.astype(np.float64) @ embedding.T.astype(np.float64)
    assert np.abs(found - exact).max() < 1e-4
    for row in (0, num_rows - 1):
        alone = tied_head(jnp.asarray(x[row : row + 1]), jnp.asarray(embedding))
        assert np.array_equal(np.asarray(alone)[0], found[row])


def test_not_a_number_stays_in_its_row():
    x, embedding = operands(7, 64, 130)
    x[3, 5] = np.nan
    found = np.asarray(tied_head(jnp.asarray(x), jnp.asarray(embedding)))
    assert np.isnan(found[3]).all()
    assert np.isfinite(np.delete(found, 3, axis=0)).all()


def test_shapes_that_do_not_fit_are_refused():
    x, embedding = operands(2, 64, 130)
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows of the embedding do not fit x"):
        tied_head(jnp.asarray(x[:, :60]), jnp.asarray(embedding)).block_until_ready()
