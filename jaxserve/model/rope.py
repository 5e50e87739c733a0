"""Rotary position embedding: frequencies from a `RopeConfig`, phase, sine and cosine in float32.

Called by the attention layers. Only the rotated result is cast to the model's dtype: a phase
computed from bfloat16 frequencies is noise after a few thousand positions.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each pair of dimensions that is turned.

    Args:
        rope: theta and scaling.
        head_dim: D, even.

    Returns:
        f32[D' / 2], of D' = rope.rotary_dim(D) dimensions.

    Source: RoFormer (Su et al. 2021), section 3.2; the scalings as `_SCALED` says.
    """
    dim = rope.rotary_dim(head_dim)
    theta = _stretched_theta(rope, dim) if rope.rope_type == "dynamic" else rope.theta
    # In float32 step by step, as the code that models are trained with: what a frequency is rounded by
    # is multiplied by positions of many thousands.
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    inv_freq = np.float32(1) / np.float32(theta) ** exponent
    scaled = _SCALED.get(rope.rope_type)
    return inv_freq if scaled is None else scaled(rope, inv_freq).astype(np.float32)


def _stretched_theta(rope: RopeConfig, dim: int) -> float:
    """The base of "dynamic", by which the longest wavelength grows as the context did.

    Source: the "dynamic NTK" of transformers, of which a text of context_len tokens gets this base.
    """
    original, context = _lengths(rope)
    grown = rope.factor * max(context, original) / original - (rope.factor - 1)
    return rope.theta * grown ** (dim / (dim - 2))


def _lengths(rope: RopeConfig) -> tuple[int, int]:
    """(the original context, the longest text), which `RopeConfig` has where they are needed."""
    original, context = rope.original_max_position_embeddings, rope.context_len
    assert original is not None
    assert context is not None
    return original, context


def _linear(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    return inv_freq / rope.factor


def _llama3(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Wavelengths beyond the original context / low_freq_factor are divided by factor, those within
    original / high_freq_factor are kept, and the band between is blended linearly in turns over the
    original context. Source: the Llama 3.1 reference code.
    """
    original = rope.original_max_position_embeddings
    assert original is not None
    turns = original * inv_freq / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blended(inv_freq, rope.factor, np.clip(kept, 0.0, 1.0))


def _yarn(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """As `_llama3`, but the band is a ramp over the dimensions that turn beta_fast to beta_slow times
    over the original context. Source: Peng et al. 2023, "YaRN", section 3.2.
    """
    original = rope.original_max_position_embeddings
    assert original is not None
    dim = 2 * len(inv_freq)

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # as the reference has it: no ramp is a step
    divided = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    return _blended(inv_freq, rope.factor, 1.0 - divided)


def _longrope(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Each divided by a factor of its own. Source: Ding et al. 2024, "LongRoPE"; which of the two
    lists, by the length of a text, as in transformers.
    """
    original, context = _lengths(rope)
    return inv_freq / np.asarray(rope.long_factors if context > original else rope.short_factors)


def _blended(inv_freq: np.ndarray, factor: float, kept: np.ndarray) -> np.ndarray:
    """Divided by factor where `kept` is 0, as they are where it is 1."""
    return kept * inv_freq + (1 - kept) * inv_freq / factor


_SCALED: dict[str, Callable[[RopeConfig, np.ndarray], np.ndarray]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def rotation(
    inv_freq: np.ndarray, positions: Int[Array, " T"], attention_factor: float = 1.0
) -> tuple[Float[Array, "T 1 D2"], Float[Array, "T 1 D2"]]:
    """(cosine, sine) of every token's phase.

    Args:
        inv_freq: f32[D' / 2].
        positions: i32[T], absolute.
        attention_factor: both are multiplied by it.

    Returns:
        Two f32[T, 1, D' / 2], ready to broadcast over heads.
    """
    phase = positions.astype(jnp.float32)[:, None, None] * inv_freq[None, None, :]
    cos, sin = jnp.cos(phase), jnp.sin(phase)
    if attention_factor == 1.0:
        return cos, sin
    return cos * attention_factor, sin * attention_factor


def rotate(
    x: Float[Array, "T N D"], cos: Float[Array, "T 1 D2"], sin: Float[Array, "T 1 D2"]
) -> Float[Array, "T N D"]:
    """Turns the first D' dimensions of each head; their two halves are the pairs, as in Hugging Face
    checkpoints. The others stay as they are: all of them where cos and sin are empty.

    Args:
        x: [T, heads, D] f32 or bf16.
        cos, sin: f32[T, 1, D' / 2].

    Returns:
        [T, heads, D] of x's dtype.
    """
    half = cos.shape[-1]
    if half == 0:
        return x
    wide = x[..., : 2 * half].astype(jnp.float32)
    low, high = jnp.split(wide, 2, axis=-1)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    turned = jax.lax.convert_element_type(turned, x.dtype)
    if 2 * half == x.shape[-1]:
        return turned
    return jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)
