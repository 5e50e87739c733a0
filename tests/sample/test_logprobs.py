"""The likeliest tokens of a row."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.sample.logprobs import chosen_logprobs, top_logprobs
from tests.numpy_llama import log_softmax

TOP = jax.jit(top_logprobs, static_argnames="count")


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
