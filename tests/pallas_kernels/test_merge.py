"""Attention over two parts of the keys, merged, is attention over all of them."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import merge_attention_states


def part(scores, values):
    """(out f32[5, 3, 8], lse f32[5, 3]) of f64 scores [5, 3, C] over values [C, 8]."""
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    out, lse = weights / total @ values, (top + np.log(total))[..., 0]
    return jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32)


@pytest.fixture
def keys():
    rng = np.random.default_rng(0)
    return rng.normal(0, 8, (5, 3, 40)), rng.normal(0, 1, (40, 8))


@pytest.mark.parametrize("cut", [1, 17, 39])
def test_two_parts_are_the_whole(keys, cut):
    scores, values = keys
    first, second = part(scores[..., :cut], values[:cut]), part(scores[..., cut:], values[cut:])
    out, lse = merge_attention_states(*first, *second)
    want, want_lse = part(scores, values)
    np.testing.assert_allclose(out, want, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)
    swapped, _ = merge_attention_states(*second, *first)
    np.testing.assert_allclose(swapped, out, atol=1e-7)


def test_scores_that_overflow_exp(keys):
    scores, values = keys
    out, lse = merge_attention_states(
        *part(scores[..., :9] + 5000, values[:9]), *part(scores[..., 9:] + 5000, values[9:])
    )
    want, want_lse = part(scores + 5000, values)
    np.testing.assert_allclose(out, want, atol=1e-3)  # an f32 lse of 5000 has steps of 5e-4
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


def test_an_empty_part_adds_nothing_not_even_nan(keys):
    out, lse = part(*keys)
    empty = jnp.full_like(out, jnp.nan), jnp.full_like(lse, -jnp.inf)
    for merged in (
        merge_attention_states(out, lse, *empty),
        merge_attention_states(*empty, out, lse),
    ):
        np.testing.assert_array_equal(merged[0], out)
        np.testing.assert_array_equal(merged[1], lse)
    nothing, none = merge_attention_states(*empty, *empty)
    assert not nothing.any()
    assert np.isneginf(none).all()


def test_a_nan_that_counts_is_seen(keys):
    """The control of the test above."""
    out, lse = part(*keys)
    merged, _ = merge_attention_states(out, lse, jnp.full_like(out, jnp.nan), lse)
    assert np.isnan(merged).all()


def test_outputs_keep_their_dtype_and_mixtures_are_refused(keys):
    out, lse = part(*keys)
    half = out.astype(jnp.bfloat16)
    merged, merged_lse = merge_attention_states(half, lse, half, lse)
    assert (merged.dtype, merged_lse.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(merged, half)
    with pytest.raises(ValueError, match="out_b: bfloat16"):
        merge_attention_states(out, lse, half, lse)
    with pytest.raises(ValueError, match="lse_b: float32"):
        merge_attention_states(out, lse, out, lse[:2])
