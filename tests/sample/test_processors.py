"""What options do to a row of logits: exact cases, transformers as the oracle, and rows that leave each
other alone.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.constraints.constraint import clear_ids, ids_mask
from jaxserve.sample.processors import (
    BiasRows,
    PenaltyRows,
    SamplingRows,
    add_sampled,
    allowed,
    drawn_from,
    load_counts,
    process,
    reported,
    without_padding,
)

ORACLE = Path(__file__).parent.parent / "oracles" / "processors.npz"
NUM_BIAS = 8
PROCESS, DRAWN, REPORTED = jax.jit(process), jax.jit(drawn_from), jax.jit(reported)
LOAD, ADD = jax.jit(load_counts), jax.jit(add_sampled)
NEVER = -np.inf


def table(histories: list[tuple[list[int], list[int]]], vocab_size: int) -> np.ndarray:
    """The count table of sequences, each a prompt and an output, one per slot."""
    counts = np.zeros((len(histories), vocab_size), np.int32)
    for slot, (prompt, output) in enumerate(histories):
        counts[slot, list(set(prompt))] = 1
        np.add.at(counts[slot], output, 2)
    return counts


def penalties(num_rows: int, repetition=1.0, frequency=0.0, presence=0.0) -> PenaltyRows:
    columns = [
        jnp.asarray(np.broadcast_to(np.asarray(value, np.float32), (num_rows,)))
        for value in (repetition, frequency, presence)
    ]
    return PenaltyRows(jnp.arange(num_rows, dtype=jnp.int32), *columns)


def bias_of(*rows: dict[int, float]) -> BiasRows:
    ids, values = np.zeros((len(rows), NUM_BIAS), np.int32), np.zeros((len(rows), NUM_BIAS), "f4")
    for row, pairs in enumerate(rows):
        ids[row, : len(pairs)], values[row, : len(pairs)] = [*pairs], [*pairs.values()]
    return BiasRows(jnp.asarray(ids), jnp.asarray(values))


def ones(num_rows: int, vocab_size: int) -> np.ndarray:
    return np.tile(ids_mask(-(-vocab_size // 32), vocab_size), (num_rows, 1))


def run(logits, counts=None, penalty=None, bias=None, masks=None) -> np.ndarray:
    logits = np.asarray(logits, np.float32)
    num_rows, vocab_size = logits.shape
    return np.asarray(
        PROCESS(
            logits,
            np.zeros((num_rows, vocab_size), np.int32) if counts is None else counts,
            penalty or penalties(num_rows),
            bias or bias_of(*[{}] * num_rows),
            ones(num_rows, vocab_size) if masks is None else masks,
        )
    )


def sampling(num_rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, flag=False):
    def column(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (num_rows,)))

    return SamplingRows(
        column(temperature, np.float32),
        column(top_k, np.int32),
        column(top_p, np.float32),
        column(min_p, np.float32),
        jnp.zeros((num_rows, 2), jnp.uint32),
        jnp.zeros(num_rows, jnp.int32),
        column(True, np.bool_),
        column(flag, np.bool_),
    )


@pytest.fixture(scope="module")
def oracle() -> dict[str, np.ndarray]:
    with np.load(ORACLE) as found:
        return dict(found)


@pytest.fixture(scope="module")
def oracle_counts(oracle) -> np.ndarray:
    pairs = zip(oracle["prompt"].tolist(), oracle["output"].tolist(), strict=True)
    return table(list(pairs), oracle["logits"].shape[1])


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal in what is left, and there but for a constant per row and rounding."""
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    found = found - found.max(axis=1, keepdims=True)
    expected = expected - expected.max(axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("name", "value"), [("repetition", 1.3), ("repetition_below_1", 0.7)])
def test_repetition_penalty_is_that_of_transformers(oracle, oracle_counts, name, value):
    found = run(oracle["logits"], oracle_counts, penalties(8, repetition=value))
    np.testing.assert_allclose(found, oracle[name], rtol=1e-6)
    assert (found != oracle["logits"]).sum() == (oracle_counts > 0).sum()


def test_logit_bias_is_that_of_transformers(oracle):
    pairs = dict(zip(oracle["bias_ids"].tolist(), oracle["bias"].tolist(), strict=True))
    found = run(oracle["logits"], bias=bias_of(*[pairs] * 8))
    np.testing.assert_allclose(found, oracle["logit_bias"], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("temperature", {"temperature": 0.7}),
        ("top_k", {"top_k": 5}),
        ("top_p", {"top_p": 0.8}),
        ("min_p", {"min_p": 0.1}),
    ],
)
def test_what_rows_are_drawn_from_is_that_of_transformers(oracle, name, options):
    found = np.asarray(DRAWN(oracle["logits"], sampling(8, **options)))
    assert_same(found, oracle[name])


def test_all_of_them_come_in_the_order_of_transformers(oracle, oracle_counts):
    pairs = dict(zip(oracle["bias_ids"].tolist(), oracle["bias"].tolist(), strict=True))
    processed = run(
        oracle["logits"], oracle_counts, penalties(8, repetition=1.3), bias_of(*[pairs] * 8)
    )
    rows = sampling(8, temperature=0.7, top_k=20, top_p=0.9, min_p=0.05)
    assert_same(np.asarray(DRAWN(processed, rows)), oracle["all"])


def test_c18_penalties_count_the_right_tokens():
    """X = 0 is in the prompt; after it was sampled it counts as output too. Y = 1, the rest is 2 to 4."""
    logits = np.array([[2.0, 1.5, -5.0, -5.0, -1.0]], np.float32)
    prompt_only = table([([0, 2], [])], 5)
    found = run(logits, prompt_only, penalties(1, repetition=1.5))
    np.testing.assert_allclose(found, [[2 / 1.5, 1.5, -7.5, -5, -1]], rtol=1e-6)
    for options in ({"frequency": 0.3}, {"presence": 1.0}):  # the prompt does not count
        np.testing.assert_array_equal(run(logits, prompt_only, penalties(1, **options)), logits)
    sampled = table([([0, 2], [0, 0, 4])], 5)
    found = run(logits, sampled, penalties(1, repetition=1.5))
    np.testing.assert_allclose(found, [[2 / 1.5, 1.5, -7.5, -5, -1.5]], rtol=1e-6)
    found = run(logits, sampled, penalties(1, frequency=0.3))
    np.testing.assert_allclose(found, [[1.4, 1.5, -5, -5, -1.3]], rtol=1e-6)
    found = run(logits, sampled, penalties(1, presence=-1.0))
    np.testing.assert_allclose(found, [[3, 1.5, -5, -5, 0]], rtol=1e-6)
    found = run(logits, sampled, penalties(1, 1.5, 0.3, 1.0))
    expected = [[2 / 1.5 - 1.6, 1.5, -7.5, -5, -1.5 - 1.3]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_mask_comes_after_the_bias_and_leaves_the_rest_alone():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(3, 70)).astype(np.float32)
    masks = ones(3, 70)
    clear_ids(masks[0], [0, 31, 32, 69])
    clear_ids(masks[2], range(69))
    found = run(logits, bias=bias_of({31: 100.0, 5: -2.0}, {0: 1.0}, {}), masks=masks)
    expected = logits.copy()
    expected[0, 5] -= 2
    expected[1, 0] += 1
    expected[0, [0, 31, 32, 69]] = expected[2, :69] = NEVER
    np.testing.assert_array_equal(found, expected)
    bits = np.asarray(allowed(jnp.asarray(masks), 70))
    np.testing.assert_array_equal(bits, np.isfinite(expected))


def test_options_that_are_off_change_no_bit_beside_rows_that_have_all():
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=(4, 70)) * 10).astype(np.float32)
    logits[:, 66:] = NEVER  # padding of the vocabulary
    logits[1, 5], logits[1, 6] = 0.0, 3e38
    counts = rng.integers(0, 9, (4, 70)).astype(np.int32)
    on = [0, 2]
    some = penalties(4, *(np.where(np.isin(range(4), on), v, d) for v, d in ((1.7, 1), (0.4, 0))))
    masks = ones(4, 70)
    for row in on:
        clear_ids(masks[row], range(0, 60, 2))
    bias = bias_of({3: 2.0}, {}, {5: -1.0, 66: 9.0}, {})
    found = run(logits, counts, some, bias, masks)
    np.testing.assert_array_equal(found[[1, 3]], logits[[1, 3]])
    assert (found[:, 66:] == NEVER).all(), "padding stays padding"
    for row in on:  # and a row is the same in any place and with any neighbour
        for place in range(2):
            order = [row, 1] if place == 0 else [1, row]
            part = PenaltyRows(*(np.asarray(column)[order] for column in some))
            alone = run(
                logits[order],
                counts,
                part,
                BiasRows(*(np.asarray(column)[order] for column in bias)),
                masks[order],
            )
            np.testing.assert_array_equal(alone[place], found[row])


def test_the_count_table_counts_and_forgets():
    counts = jnp.full((3, 50), 9, jnp.int32)
    ids = np.array([4, 7, 7, 9, 0, 0], np.int32)  # 7 of the prompt was sampled too
    amounts = np.array([1, 1, 4, 2, 0, 0], np.int32)
    counts = LOAD(counts, np.int32(1), np.bool_(True), ids, amounts)
    more = np.array([12, 0, 0, 0, 0, 0], np.int32)
    counts = LOAD(counts, np.int32(1), np.bool_(False), more, np.array([1, 0, 0, 0, 0, 0], "i4"))
    expected = np.full((3, 50), 9)
    expected[1] = 0
    expected[1, [4, 7, 9, 12]] = [1, 5, 2, 1]
    np.testing.assert_array_equal(counts, expected)
    # Rows without penalties, and padding, have slot 3: none.
    slots, sampled = np.array([2, 3, 1, 3], np.int32), np.array([7, 8, 7, 0], np.int32)
    counts = ADD(counts, slots, sampled)
    expected[2, 7] += 2
    expected[1, 7] += 2
    np.testing.assert_array_equal(counts, expected)


@pytest.mark.parametrize("num_token_ids", [1, 5, 69, 70])
def test_padding_of_the_vocabulary_is_in_no_normaliser(num_token_ids):
    logits = np.random.default_rng(4).normal(size=(2, 70)).astype(np.float32)
    found = without_padding(jnp.asarray(logits), num_token_ids)
    np.testing.assert_array_equal(found[:, :num_token_ids], logits[:, :num_token_ids])
    assert (np.asarray(found)[:, num_token_ids:] == NEVER).all()
    np.testing.assert_allclose(
        jax.nn.logsumexp(found, axis=1),
        jax.nn.logsumexp(jnp.asarray(logits[:, :num_token_ids]), axis=1),
        rtol=1e-6,
    )
    hot = np.asarray(DRAWN(found, sampling(2, temperature=50.0, top_k=70)))
    assert np.isfinite(hot[:, :num_token_ids]).all()
    assert (hot[:, num_token_ids:] == NEVER).all()


def test_each_row_reports_what_it_asks_for():
    rng = np.random.default_rng(6)
    raw, processed = rng.normal(size=(2, 4, 9)).astype(np.float32)
    rows = sampling(4, temperature=[0.0, 0.5, 0.0, 0.5], top_k=2, flag=[True, True, False, False])
    found = np.asarray(REPORTED(raw, processed, rows))
    np.testing.assert_array_equal(found[2:], raw[2:])
    # Greedy: what the argmax is taken of, with no temperature and no top_k; all but a constant.
    np.testing.assert_allclose(found[0], processed[0] - processed[0].max(), atol=1e-6)
    assert np.isfinite(found[1]).sum() == 2
    best = np.argsort(-processed[1])[:2]
    np.testing.assert_allclose(found[1, best], 2 * (processed[1, best] - processed[1].max()))


C19 = np.log(np.array([0.5, 0.25, 0.15, 0.06, 0.04], np.float32))


@pytest.mark.parametrize(
    ("options", "support"),
    [
        ({"temperature": 2.0, "top_p": 0.6}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.8}, [0, 1]),
        ({"min_p": 0.2}, [0, 1, 2]),
        ({"temperature": 2.0, "min_p": 0.2}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5, "min_p": 0.2}, [0, 1]),
        ({"top_p": 1e-9}, [0]),
        ({"top_p": 0.0}, [0]),
        ({"top_k": 0}, [0, 1, 2, 3, 4]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 10**6}, [0, 1, 2, 3, 4]),
    ],
)
def test_c19_what_is_left(options, support):
    found = np.asarray(DRAWN(C19[None], sampling(1, **options)))[0]
    assert np.flatnonzero(np.isfinite(found)).tolist() == support
    expected = np.exp(C19[support] / options.get("temperature", 1.0))
    weights = np.exp(found[support])
    np.testing.assert_allclose(weights / weights.sum(), expected / expected.sum(), rtol=1e-5)


def test_c19_a_masked_token_is_in_no_count_and_no_mass():
    masks = ones(1, 5)
    clear_ids(masks[0], [0])
    cases = [({"top_k": 2}, [1, 2]), ({"top_p": 0.45}, [1]), ({"top_p": 0.75}, [1, 2])]
    for options, support in cases:
        processed = run(C19[None], masks=masks)
        found = np.asarray(DRAWN(processed, sampling(1, **options)))[0]
        assert np.flatnonzero(np.isfinite(found)).tolist() == support
