"""Rotary phase in float32: right at the end of a long context, whatever the model's dtype."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.model.rope import inverse_frequencies, rotate, rotation
from jaxserve.rope_config import RopeConfig

POSITIONS = np.array([0, 255, 1000, 4095, 8191], np.int32)


def exact(theta: float = 1e4, head_dim: int = 64) -> np.ndarray:
    inv_freq = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return np.cos(POSITIONS[:, None] * inv_freq)


def test_c28_phase_is_exact_at_long_positions():
    inv_freq = inverse_frequencies(RopeConfig(theta=1e4), 64)
    cos, sin = rotation(inv_freq, jnp.asarray(POSITIONS))
    assert cos.dtype == sin.dtype == jnp.float32
    assert np.abs(np.asarray(cos)[:, 0] - exact()).max() < 5e-3
    # The control: frequencies in bfloat16 are noise there.
    narrow = inv_freq.astype(jnp.bfloat16).astype(np.float32)
    assert np.abs(np.cos(POSITIONS[:, None] * narrow) - exact()).max() > 0.5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_c28_only_the_result_is_cast(dtype):
    inv_freq = inverse_frequencies(RopeConfig(theta=1e4), 64)
    cos, sin = rotation(inv_freq, jnp.asarray(POSITIONS))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 2, 64)), dtype)
    turned = rotate(x, cos, sin)
    assert turned.dtype == dtype
    wide = np.asarray(x, np.float64)
    low, high = wide[..., :32], wide[..., 32:]
    c = exact()[:, None]
    s = np.sin(POSITIONS[:, None] / 1e4 ** (np.arange(0, 64, 2) / 64))[:, None]
    expected = np.concatenate([low * c - high * s, high * c + low * s], axis=-1)
    tolerance = 1e-2 if dtype == jnp.float32 else 5e-2
    assert np.abs(np.asarray(turned, np.float64) - expected).max() < tolerance


def test_linear_and_llama3_scaling():
    plain = inverse_frequencies(RopeConfig(theta=5e5), 128)
    linear = inverse_frequencies(RopeConfig(theta=5e5, rope_type="linear", factor=4.0), 128)
    np.testing.assert_allclose(linear, plain / 4, rtol=1e-6)
    llama3 = inverse_frequencies(
        RopeConfig(
            theta=5e5,
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        128,
    )
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_allclose(llama3[turns > 4], plain[turns > 4], rtol=1e-6)
    np.testing.assert_allclose(llama3[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    between = (turns >= 1) & (turns <= 4)
    assert between.any()
    assert (llama3[between] < plain[between]).all()
    assert (llama3[between] > plain[between] / 8).all()


def test_dynamic_is_the_base_of_a_text_as_long_as_the_context():
    def at(context_len: int) -> np.ndarray:
        original = {"original_max_position_embeddings": 64, "context_len": context_len}
        return inverse_frequencies(RopeConfig(rope_type="dynamic", factor=3.0, **original), 16)

    plain = inverse_frequencies(RopeConfig(), 16)
    np.testing.assert_array_equal(at(64), plain)
    np.testing.assert_array_equal(at(10), plain)
    # 3 * 2 - 2 = 4 times the base, to the power of 16 / 14
    np.testing.assert_allclose(
        at(128), inverse_frequencies(RopeConfig(theta=1e4 * 4 ** (8 / 7)), 16)
    )


def test_yarn_divides_what_turns_seldom_and_keeps_what_turns_often():
    rope = RopeConfig(
        theta=1e6, rope_type="yarn", factor=4.0, original_max_position_embeddings=8192
    )
    plain, yarn = inverse_frequencies(RopeConfig(theta=1e6), 128), inverse_frequencies(rope, 128)
    turns = 8192 * plain.astype(np.float64) / (2 * np.pi)
    np.testing.assert_allclose(yarn[turns > 40], plain[turns > 40], rtol=1e-6)
    np.testing.assert_allclose(yarn[turns < 0.8], plain[turns < 0.8] / 4, rtol=1e-6)
    between = (turns > 1.5) & (turns < 25)
    assert between.any()
    assert (yarn[between] < plain[between]).all()
    assert (yarn[between] > plain[between] / 4).all()


def test_longrope_divides_each_by_the_factors_of_its_context():
    factors = {"short_factors": (1.0, 2.0, 3.0, 4.0), "long_factors": (8.0, 4.0, 2.0, 1.0)}
    rope = RopeConfig(
        rope_type="longrope", original_max_position_embeddings=64, context_len=64, **factors
    )
    plain = inverse_frequencies(RopeConfig(), 8)
    np.testing.assert_allclose(inverse_frequencies(rope, 8), plain / [1, 2, 3, 4], rtol=1e-6)
    longer = inverse_frequencies(rope.at_context(65), 8)
    np.testing.assert_allclose(longer, plain / [8, 4, 2, 1], rtol=1e-6)


def test_a_part_of_each_head_is_turned_and_the_rest_is_as_it_was():
    rope = RopeConfig(partial_rotary_factor=0.5)
    inv_freq = inverse_frequencies(rope, 16)
    np.testing.assert_array_equal(inv_freq, inverse_frequencies(RopeConfig(), 8))
    cos, sin = rotation(inv_freq, jnp.asarray(POSITIONS))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 2, 16)), jnp.float32)
    turned = rotate(x, cos, sin)
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(turned[..., :8], rotate(x[..., :8], cos, sin))
    assert np.abs(np.asarray(turned - x)[1:, :, :8]).min() > 0
    nothing = jnp.zeros((5, 1, 0), jnp.float32)
    assert rotate(x, nothing, nothing) is x


def test_an_attention_factor_scales_sine_and_cosine():
    inv_freq = inverse_frequencies(RopeConfig(), 16)
    plain = rotation(inv_freq, jnp.asarray(POSITIONS))
    scaled = rotation(inv_freq, jnp.asarray(POSITIONS), 1.5)
    for one, other in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(other, 1.5 * one, rtol=1e-6)
