"""Dense products in C++: right numbers, the same bits beside any rows, every edge of panels and blocks,
and what stands before and behind a product."""

import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense.cpu import (
    PANEL,
    Norm,
    Part,
    dense,
    dense_gated,
    dense_heads,
    pack,
    pack_gated,
)

call = jax.jit(dense, static_argnums=2)
# K below, at and above the kernel's depth; N with half panels, single columns and many panels.
SIZES = [(576, 960), (1536, 576), (288, 64), (37, 5), (7, 1600), (1, 33), (300, 97), (64, 32)]
EPS = 1e-5
# jax raises the one where the call waits for itself, the other where its result is waited for.
REFUSED = (jax.errors.JaxRuntimeError, ValueError)


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
    with pytest.raises(REFUSED, match="does not fit x of 64"):
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


def with_arrays(function):
    """The function, given arrays of numpy."""

    def run(*operands, **options):
        on_device = jax.tree.map(
            lambda one: jnp.asarray(one) if isinstance(one, np.ndarray) else one,
            (operands, options),
        )
        return function(*on_device[0], **on_device[1])

    return run


plain, gated, cut = map(with_arrays, (dense, dense_gated, dense_heads))


def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """In float64."""
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS) * scale


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape, np.float32)


def named(names: set[str]) -> str:
    """A set as part of a test's id, the same in every process."""
    return "+".join(sorted(names)) or "nothing"


@pytest.mark.parametrize("num_rows", [1, 7, 500])
@pytest.mark.parametrize(("size", "columns"), [(576, 576), (1536, 97), (37, 5), (5, 130)])
@pytest.mark.parametrize(
    "given",
    [{"norm"}, {"bias"}, {"residual"}, {"norm", "bias", "residual"}],
    ids=named,
)
def test_norm_bias_and_residual(num_rows, size, columns, given):
    x, weight = operands(num_rows, size, columns)
    scale, bias, residual = random(size), random(columns), random(num_rows, columns)
    exact = (normed(x, scale) if "norm" in given else x.astype(np.float64)) @ weight
    options = {}
    if "norm" in given:
        options["norm"] = Norm(scale, EPS)
    if "bias" in given:
        options["bias"], exact = bias, exact + bias
    if "residual" in given:
        options["residual"], exact = residual, exact + residual
    packed = pack([weight])
    y = np.asarray(plain(x, packed, columns, **options))
    assert np.abs(y - exact).max() < 1e-5 * size**0.5
    last = options | ({"residual": residual[-1:]} if "residual" in given else {})
    assert np.array_equal(np.asarray(plain(x[-1:], packed, columns, **last))[0], y[-1])


@pytest.mark.parametrize("num_rows", [1, 40, 500])
@pytest.mark.parametrize(("size", "columns"), [(576, 1536), (300, 97), (24, 40), (7, 1)])
@pytest.mark.parametrize("is_full", [True, False])
def test_gated(num_rows, size, columns, is_full):
    x, gate, up = random(num_rows, size), random(size, columns), random(size, columns + 1)[:, 1:]
    scale, bias = random(size), 30 * random(2 * columns)
    options = {"norm": Norm(scale, EPS), "bias": bias} if is_full else {}
    rows = normed(x, scale) if is_full else x.astype(np.float64)
    both = [
        rows @ one + is_full * part for one, part in zip((gate, up), np.split(bias, 2), strict=True)
    ]
    exact = both[0] * np.exp(-np.logaddexp(0, -both[0])) * both[1]
    packed = pack_gated(gate, up)
    y = np.asarray(gated(x, packed, columns, **options))
    # Each factor is right to about 1e-5 of the size of its sum, and silu's slope is at most 1.1.
    assert (np.abs(y - exact) <= 2e-5 * size**0.5 * (1 + np.abs(both[0]) + np.abs(both[1]))).all()
    last = np.asarray(gated(x[-1:], packed, columns, **options))
    assert np.array_equal(last[0], y[-1])


def test_gated_ends():
    """Gates far from 0 switch off and on, and none of them makes a NaN."""
    gates = np.array([[-1e30, -200, -90, 0, 90, 1e30]], np.float32)
    packed = pack_gated(gates, np.ones((1, 6), np.float32))
    y = np.asarray(gated(np.ones((1, 1), np.float32), packed, 6))[0]
    assert np.abs(y[1:4]).max() < 1e-30
    assert np.abs(y[0]) < 1e-5
    assert y[4:] == pytest.approx(gates[0, 4:])


@pytest.mark.parametrize("columns", [1, 32, 40, 96, 100])
def test_gate_and_up_share_their_panels(columns):
    gate, up = random(12, columns), random(12, columns + 2)[:, 2:]
    packed = pack_gated(gate, up)
    assert packed.shape == (-(-columns // 32), 12, PANEL)
    for begin, weight in ((0, gate), (32, up)):
        flat = packed[:, :, begin : begin + 32].transpose(1, 0, 2).reshape(12, -1)
        assert np.array_equal(flat[:, :columns], weight)
        assert not flat[:, columns:].any()
    abstract = pack_gated(*(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (gate, up)))
    assert (abstract.shape, abstract.dtype) == (packed.shape, packed.dtype)


@pytest.mark.parametrize("num_rows", [1, 7, 500])
@pytest.mark.parametrize("given", [{"residual"}, {"bias"}, {"bias", "residual"}, set()], ids=named)
def test_a_multiplier_is_of_all_but_the_residual(num_rows, given):
    x, weight = operands(num_rows, 96, 97)
    bias, residual = random(97), random(num_rows, 97)
    exact = x.astype(np.float64) @ weight
    options = {}
    if "bias" in given:
        options["bias"], exact = bias, exact + bias
    exact = 0.25 * exact
    if "residual" in given:
        options["residual"], exact = residual, exact + residual
    y = np.asarray(plain(x, pack([weight]), 97, multiplier=0.25, **options))
    assert np.abs(y - exact).max() < 1e-4


@pytest.mark.parametrize("num_rows", [1, 5, 300])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "turned"),
    [
        (9, 3, 64, 64),
        (4, 2, 16, 16),
        (3, 1, 80, 80),
        (2, 1, 256, 256),
        (4, 2, 96, 72),
        (3, 3, 24, 0),
    ],
)
@pytest.mark.parametrize("is_full", [True, False])
def test_heads_are_cut_normed_and_rotated(num_rows, heads, kv_heads, dim, turned, is_full):
    size, columns = 96, (heads + 2 * kv_heads) * dim
    x, weight = operands(num_rows, size, columns)
    scale, bias = random(size), random(columns)
    options = {"norm": Norm(scale, EPS), "bias": bias} if is_full else {}
    phase = 3 * random(num_rows, 1, turned // 2).astype(np.float64)
    cos, sin = np.cos(phase), np.sin(phase)
    y = (normed(x, scale) if is_full else x.astype(np.float64)) @ weight + is_full * bias
    q, k, v = np.split(y.reshape(num_rows, -1, dim), [heads, heads + kv_heads], axis=1)
    if is_full:
        norms = Norm(random(dim), EPS), Norm(random(dim + 1)[1:], EPS)
        options |= dict(zip(("q_norm", "k_norm"), norms, strict=True))
        q, k = (
            normed(one.reshape(-1, dim), norm.scale).reshape(one.shape)
            for one, norm in zip((q, k), norms, strict=True)
        )

    def turn(one: np.ndarray) -> np.ndarray:
        low, high, rest = np.split(one, [turned // 2, turned], axis=2)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=2)

    exact = turn(q), turn(k), v
    packed = pack([weight])
    phases = cos.astype(np.float32), sin.astype(np.float32)
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    found = cut(x, packed, *phases, **sizes, **options)
    last = cut(x[-1:], packed, *(one[-1:] for one in phases), **sizes, **options)
    for one, right, alone in zip(found, exact, last, strict=True):
        assert one.shape == right.shape
        assert np.abs(np.asarray(one) - right).max() < 1e-4
        assert np.array_equal(np.asarray(alone)[0], np.asarray(one)[-1])


def test_parameters_may_be_parts_of_one_array():
    """The same bits as with arrays of their own."""
    x, weight = operands(5, 96, 64)
    gate, up, scale = random(96, 40), random(96, 41)[:, 1:], random(96)
    bias, q_scale, k_scale = random(64), random(16), random(17)[1:]
    pieces = [pack([weight]), pack_gated(gate, up), scale, bias, q_scale, k_scale]
    places = np.cumsum([8, *(one.size for one in pieces)])
    together = np.concatenate([np.full(8, np.nan, np.float32), *map(np.ravel, pieces)])
    parts = [Part(together, int(at)) for at in places[:-1]]
    cos = np.cos(random(5, 1, 8))

    def results(packed, packed_gate, scale, bias, q_scale, k_scale):
        norm = Norm(scale, EPS)
        norms = {"norm": norm, "q_norm": Norm(q_scale, EPS), "k_norm": Norm(k_scale, EPS)}
        sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
        yield plain(x, packed, 64, norm=norm, bias=bias)
        yield gated(x, packed_gate, 40, norm=norm)
        yield from cut(x, packed, cos, cos, bias=bias, **sizes, **norms)

    for one, other in zip(results(*pieces), results(*parts), strict=True):
        assert np.isfinite(np.asarray(one)).all()
        assert np.array_equal(np.asarray(one), np.asarray(other))


def test_not_a_number_stays_in_its_row_with_all_that_is_fused():
    x = random(7, 64)
    x[3, 5] = np.nan
    expected = np.arange(7) != 3
    norm = Norm(np.ones(64, np.float32), EPS)
    cos = np.ones((7, 1, 8), np.float32)
    found = [
        plain(x, pack([random(64, 70)]), 70, norm=norm, residual=random(7, 70)),
        gated(x, pack_gated(random(64, 70), random(64, 70)), 70, norm=norm),
        *cut(
            x, pack([random(64, 64)]), cos, cos, num_heads=2, num_kv_heads=1, head_dim=16, norm=norm
        ),
    ]
    for one in found:
        is_finite = np.isfinite(np.asarray(one)).reshape(7, -1)
        assert np.array_equal(is_finite, np.broadcast_to(expected[:, None], is_finite.shape))


def wrong(fault: str):
    """A call with one operand that does not fit."""
    x, ones = np.ones((2, 64), np.float32), lambda *shape: np.ones(shape, np.float32)
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    match fault:
        case "scale":
            return plain(x, ones(1, 64, 64), 64, norm=Norm(ones(63), EPS))
        case "bias":
            return plain(x, ones(1, 64, 64), 60, bias=ones(64))
        case "residual":
            return plain(x, ones(1, 64, 64), 64, residual=ones(2, 63))
        case "gated":
            return gated(x, ones(1, 64, 64), 33)
        case "gated bias":
            return gated(x, ones(1, 64, 64), 32, bias=ones(32))
        case "heads":
            return cut(x, ones(2, 64, 64), ones(2, 1, 8), ones(2, 1, 8), **heads)[0]
        case "phases":
            return cut(x, ones(1, 64, 64), ones(1, 1, 8), ones(1, 1, 8), **heads)[0]
        case "too many phases":
            return cut(x, ones(1, 64, 64), ones(2, 1, 9), ones(2, 1, 9), **heads)[0]
        case "sines":
            return cut(x, ones(1, 64, 64), ones(2, 1, 8), ones(2, 1, 7), **heads)[0]
        case "no weight there":
            return plain(x, Part(ones(64 * 64 + 63), 64), 64)
        case "before the array":
            return plain(x, Part(ones(64 * 64), -1), 64)
        case "no scale there":
            norm = Norm(Part(ones(64 * 64 + 63), 64 * 64), EPS)
            return plain(x, Part(ones(64 * 64 + 63), 0), 64, norm=norm)
        case "head norm":
            norm = Norm(ones(8), EPS)
            return cut(x, ones(1, 64, 64), ones(2, 1, 8), ones(2, 1, 8), **heads, k_norm=norm)[0]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("scale", "scale [63] from 0 on does not fit, expected 64 floats"),
        ("bias", "bias [64] from 0 on does not fit, expected 60 floats"),
        ("no weight there", "parameters [4159] hold no weight of 4096 floats from 64 on"),
        ("before the array", "parameters [4096] hold no weight of 4096 floats from -1 on"),
        ("no scale there", "scale [4159] from 4096 on does not fit, expected 64 floats"),
        ("residual", "residual [2, 63] does not fit a result [2, 64]"),
        ("gated", "a weight of 1 panels of 64 rows and 64 columns does not fit"),
        ("gated bias", "bias [32] from 0 on does not fit, expected 64 floats"),
        ("heads", "a weight of 2 panels of 64 rows and 64 columns does not fit"),
        ("phases", "cos [1, 1, 8] and sin [1, 1, 8], expected [2, 1, at most 8]"),
        ("too many phases", "cos [2, 1, 9] and sin [2, 1, 9], expected [2, 1, at most 8]"),
        ("sines", "cos [2, 1, 8] and sin [2, 1, 7], expected [2, 1, at most 8]"),
        ("head norm", "scale of k [8] from 0 on does not fit, expected 16 floats"),
    ],
)
def test_operands_that_do_not_fit_are_refused(fault, message):
    with pytest.raises(REFUSED, match=re.escape(message)):
        wrong(fault).block_until_ready()
