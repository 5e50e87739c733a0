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
