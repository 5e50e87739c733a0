"""Log-probabilities of chosen and given tokens, and the likeliest tokens of a row."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.sample.logprobs import (
    LEAST_LOGPROB,
    chosen_logprobs,
    score_targets,
    top_logprobs,
)
from tests.numpy_llama import log_softmax

TOP = jax.jit(top_logprobs, static_argnames="count")
SCORE = jax.jit(score_targets, static_argnames="num_top")


def test_the_likeliest_come_first_with_their_logprobs():
    logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32) * 5
    ids, logprobs = TOP(jnp.asarray(logits), count=7)
    expected = log_softmax(logits.astype(np.float64))
    order = np.argsort(-expected, axis=1, kind="stable")[:, :7]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(logprobs, np.take_along_axis(expected, order, 1), atol=1e-5)
    chosen = jax.jit(chosen_logprobs)(jnp.asarray(logits), ids[:, 2])
    np.testing.assert_allclose(logprobs[:, 2], chosen, rtol=1e-6)


def test_of_equals_the_lower_id_comes_first():
    logits = jnp.array([[1, 3, 2, 3, 1, 3], [0] * 6, [-1e30, 5, -1e30, 5, 5, 6]], jnp.float32)
    ids, logprobs = TOP(logits, count=6)
    assert np.asarray(ids).tolist() == [
        [1, 3, 5, 2, 0, 4],
        [0, 1, 2, 3, 4, 5],
        [5, 1, 3, 4, 0, 2],
    ]
    np.testing.assert_allclose(logprobs[1], np.full(6, -np.log(6)), rtol=1e-6)


def test_a_row_that_is_not_finite_leaves_the_others_alone():
    logits = np.random.default_rng(1).normal(size=(3, 20)).astype(np.float32)
    alone = TOP(jnp.asarray(logits), count=4)
    logits[1, 3:] = np.nan
    for one, other in zip(alone, TOP(jnp.asarray(logits), count=4), strict=True):
        np.testing.assert_array_equal(np.asarray(one)[[0, 2]], np.asarray(other)[[0, 2]])


def test_what_is_ruled_out_has_the_least_logprob_and_no_part_in_the_others():
    logits = np.full((2, 6), -np.inf, np.float32)
    logits[0, [1, 4]] = 0
    logits[1] = [0, -2e4, 0, -1e38, 0, 0]
    ids, logprobs = TOP(jnp.asarray(logits), count=6)
    assert np.asarray(ids[0]).tolist() == [1, 4, 0, 2, 3, 5]
    half, quarter = -np.log(2), -np.log(4)
    np.testing.assert_allclose(logprobs[0], [half, half, *[LEAST_LOGPROB] * 4], rtol=1e-6)
    np.testing.assert_allclose(logprobs[1], [*[quarter] * 4, *[LEAST_LOGPROB] * 2], rtol=1e-6)
    chosen = jax.jit(chosen_logprobs)(jnp.asarray(logits), jnp.array([0, 3]))
    assert np.asarray(chosen).tolist() == [LEAST_LOGPROB] * 2


def test_a_target_is_scored_and_ranked():
    logits = np.random.default_rng(2).normal(size=(4, 30)).astype(np.float32) * 3
    logits[3, :7], logits[3, 7:] = 2, -1
    targets = np.array([3, 29, int(np.argmax(logits[2])), 6], np.int32)
    expected = log_softmax(logits.astype(np.float64))
    found = SCORE(jnp.asarray(logits), targets, num_top=0)
    np.testing.assert_allclose(found.logprobs, expected[np.arange(4), targets], atol=1e-5)
    ranks = [int(np.sum(row > row[t])) + 1 for row, t in zip(logits, targets, strict=True)]
    assert np.asarray(found.ranks).tolist() == ranks
    assert ranks[2:] == [1, 1]  # nothing is likelier than its equals
    assert found.top_ids is found.top_logprobs is None
    top = SCORE(jnp.asarray(logits), targets, num_top=5)
    ids, logprobs = TOP(jnp.asarray(logits), count=5)
    np.testing.assert_array_equal(top.top_ids, ids)
    np.testing.assert_array_equal(top.top_logprobs, logprobs)
