"""Dense products in C++: right numbers, the same bits beside any rows, every edge of panels and blocks."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense.cpu import PANEL, dense, pack

call = jax.jit(dense, static_argnums=2)
# K below, at and above the kernel's depth; N with half panels, single columns and many panels.
SIZES = [(576, 960), (1536, 576), (288, 64), (37, 5), (7, 1600), (1, 33), (300, 97), (64, 32)]


def operands(num_rows: int, size: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(size)
    weight = rng.standard_normal((size, columns), np.float32)
    return rng.standard_normal((num_rows, size), np.float32), weight


@pytest.mark.parametrize("num_rows", [*range(1, 10), 13, 24, 97, 500])
@pytest.mark.parametrize(("size", "columns"), SIZES)
def test_it_is_the_product_and_a_row_is_the_same_beside_any_rows(num_rows, size, columns):
    x, weight = operands(num_rows, size, columns)
    packed = pack([weight])
    y = np.asarray(call(x, packed, columns))
    exact = x.astype(np.float64) @ weight.astype(np.float64)
    bound = np.abs(x).astype(np.float64) @ np.abs(weight)  # of a sum in order: size roundings
    assert (np.abs(y - exact) <= 2.0**-24 * (size + 1) * bound).all()
    for row in {0, num_rows // 2, num_rows - 1}:
        assert np.array_equal(np.asarray(call(x[row : row + 1], packed, columns))[0], y[row])


def test_a_huge_term_costs_only_those_of_its_block_their_last_bits():
    """As the activations of real models have them. Beside 2**24 a half is rounded away."""
    size, depth = 1536, 288
    for place in (0, 700, size - 1):
        x, weight = np.ones((3, size), np.float32), np.full((size, 70), 0.5, np.float32)
        weight[place] = 2.0**24
        y = np.asarray(call(x, pack([weight]), 70)).astype(np.float64)
        exact = 2.0**24 + (size - 1) / 2
        assert np.abs(y - exact).max() <= depth / 2 + size / depth


@pytest.mark.parametrize("columns", [(576, 192, 192), (5, 70), (64, 128), (40, 24, 7), (1, 1)])
def test_weights_are_packed_side_by_side(columns):
    weights = [operands(1, 12, n)[1] + i for i, n in enumerate(columns)]
    packed = pack(weights)
    whole = np.concatenate(weights, axis=1)
    num_panels = -(-whole.shape[1] // PANEL)
    assert packed.shape == (num_panels, 12, PANEL)
    assert packed.flags.c_contiguous
    flat = packed.transpose(1, 0, 2).reshape(12, -1)
    assert np.array_equal(flat[:, : whole.shape[1]], whole)
    assert not flat[:, whole.shape[1] :].any()
    turned = pack([jnp.asarray(np.asfortranarray(one)) for one in weights])
    assert np.array_equal(turned, packed)
    abstract = pack([jax.ShapeDtypeStruct(one.shape, one.dtype) for one in weights])
    assert (abstract.shape, abstract.dtype) == (packed.shape, packed.dtype)


def test_a_column_does_not_depend_on_those_beside_it():
    x, _ = operands(4, 576, 1)
    weights = [operands(1, 576, n)[1] for n in (576, 192, 192)]
    together = np.asarray(call(x, pack(weights), 960))
    alone = [np.asarray(call(x, pack([one]), one.shape[1])) for one in weights]
    assert np.array_equal(together, np.concatenate(alone, axis=1))


def test_not_a_number_stays_in_its_row_or_column():
    x, weight = operands(7, 64, 130)
    x[3, 5], weight[7, 129] = np.nan, np.inf
    found = np.isfinite(np.asarray(call(x, pack([weight]), 130)))
    expected = np.ones((7, 130), bool)
    expected[3], expected[:, 129] = False, False
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("shape", "columns"), [((3, 60, 64), 130), ((2, 64, 64), 130), ((3, 64, 32), 130)]
)
def test_shapes_that_do_not_fit_are_refused(shape, columns):
    with pytest.raises(jax.errors.JaxRuntimeError, match="does not fit x of 64"):
        call(np.ones((2, 64), np.float32), np.ones(shape, np.float32), columns).block_until_ready()


def test_no_rows_give_no_results():
    assert call(np.ones((0, 64), np.float32), np.ones((1, 64, 64), np.float32), 64).shape == (0, 64)


def test_many_threads_call_at_once():
    """Helpers that stay between calls take over each other's work: nothing is lost or done twice."""
    cases = []
    for num_rows, size, columns in [(1, 576, 576), (7, 96, 960), (64, 300, 97), (3, 64, 32)]:
        x, weight = operands(num_rows, size, columns)
        packed = pack([weight])
        cases.append((x, packed, columns, np.asarray(call(x, packed, columns))))

    def run(number: int) -> bool:
        for turn in range(60):
            x, packed, columns, expected = cases[(number + turn) % len(cases)]
            if not np.array_equal(np.asarray(call(x, packed, columns)), expected):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(16)))
