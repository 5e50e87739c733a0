"""Rotary position embedding: frequencies from a `RopeConfig`, phase, sine and cosine in float32.

Called by the attention layers. Only the rotated result is cast to the model's dtype: a phase
computed from bfloat16 frequencies is noise after a few thousand positions.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each pair of dimensions.

    Args:
        rope: theta and scaling.
        head_dim: D, even.

    Returns:
        f32[D / 2].

    Source: RoFormer (Su et al. 2021), section 3.2; "llama3" as in the Llama 3.1 reference code:
        wavelengths beyond
    the original context / low_freq_factor are divided by factor, those within original /
    high_freq_factor are kept, and the band between is blended linearly in turns over the original
    context.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    inv_freq = 1.0 / rope.theta**exponent
    if rope.rope_type == "linear":
        inv_freq = inv_freq / rope.factor
    elif rope.rope_type == "llama3":
        original = rope.original_max_position_embeddings
        assert original is not None  # RopeConfig refuses llama3 without it
        turns = original * inv_freq / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        inv_freq = kept * inv_freq + (1 - kept) * inv_freq / rope.factor
    return inv_freq.astype(np.float32)


def rotation(
    inv_freq: np.ndarray, positions: Int[Array, " T"]
) -> tuple[Float[Array, "T 1 D2"], Float[Array, "T 1 D2"]]:
    """(cosine, sine) of every token's phase.

    Args:
        inv_freq: f32[D / 2].
        positions: i32[T], absolute.

    Returns:
        Two f32[T, 1, D / 2], ready to broadcast over heads.
    """
    phase = positions.astype(jnp.float32)[:, None, None] * inv_freq[None, None, :]
    return jnp.cos(phase), jnp.sin(phase)


def rotate(
    x: Float[Array, "T N D"], cos: Float[Array, "T 1 D2"], sin: Float[Array, "T 1 D2"]
) -> Float[Array, "T N D"]:
    """Rotates each head; the two halves of D are the pairs, as in Hugging Face checkpoints.

    Args:
        x: [T, heads, D] f32 or bf16.
        cos, sin: f32[T, 1, D / 2].

    Returns:
        [T, heads, D] of x's dtype.
    """
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return jax.lax.convert_element_type(turned, x.dtype)
