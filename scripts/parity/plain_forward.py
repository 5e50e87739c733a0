"""A Llama forward pass over whole texts in plain jnp: no pages, no cache, no chunks, no kernels.

What the engine's log-probabilities are compared with by `scripts/parity_report`. It takes the same
params and shares no code with `jaxserve.model` but the frequencies of rope. It computes in float64, so
that what is found is the engine's rounding and not its own: in float32 a plain pass over SmolLM2 is off
by 2e-4 where the first tokens' activations are huge, three times as much as the engine.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.model.rope import inverse_frequencies
from jaxserve.model_config import ModelConfig

PRECISION = jax.lax.Precision.HIGHEST


class PlainForward:
    """Log-probabilities of every next token of a text.

    Args:
        config: shapes and constants.
        params: nested dict of arrays, as `load_model` gives them.
        num_token_ids: ids from here on are padding of the head.
        max_tokens: longest text; shorter ones are padded to it, so one program serves all.
    """

    def __init__(
        self, config: ModelConfig, params: dict[str, Any], num_token_ids: int, max_tokens: int
    ):
        with jax.enable_x64(True):
            self._params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        self._max_tokens = max_tokens
        self._run = jax.jit(functools.partial(_logprobs, config, num_token_ids))

    def __call__(self, token_ids: list[int]) -> np.ndarray:
        """f64[T]: the natural-log probability of each token after those before it; NaN for the first.

        Args:
            token_ids: T ids, at least two.
        """
        padded = np.zeros(self._max_tokens, np.int32)
        padded[: len(token_ids)] = token_ids
        with jax.enable_x64(True):
            found = np.asarray(self._run(self._params, padded))[: len(token_ids) - 1]
        return np.concatenate([[np.nan], found])


def _logprobs(
    config: ModelConfig, num_token_ids: int, params: dict[str, Any], ids: jax.Array
) -> jax.Array:
    """f64[T - 1]: of each token but the first. A token sees no later one, so padding behind the text
    changes nothing.
    """
    x = params["embed"]["embedding"][ids]
    frequencies = jnp.asarray(inverse_frequencies(config.rope, config.head_dim), x.dtype)
    phase = jnp.arange(len(ids), dtype=x.dtype)[:, None] * frequencies[None, :]
    for layer in range(config.num_layers):
        block = params["layers"][layer]
        x = x + _attention(config, block["attn"], _norm(config, block["input_norm"], x), phase)
        y = _norm(config, block["post_attn_norm"], x)
        mlp = block["mlp"]
        x = x + _linear(mlp["down"], jax.nn.silu(_linear(mlp["gate"], y)) * _linear(mlp["up"], y))
    x = _norm(config, params["norm"], x)
    tied = config.tie_word_embeddings
    head = params["embed"]["embedding"].T if tied else params["lm_head"]["kernel"]
    logits = jnp.matmul(x, head, precision=PRECISION)[:, :num_token_ids]
    return jnp.take_along_axis(jax.nn.log_softmax(logits[:-1], axis=1), ids[1:, None], axis=1)[:, 0]


def _norm(config: ModelConfig, norm: dict[str, Any], x: jax.Array) -> jax.Array:
    size = jnp.sqrt(jnp.mean(x**2, axis=1, keepdims=True) + config.rms_norm_eps)
    return x / size * norm["scale"][None, :]


def _linear(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    y = jnp.matmul(x, layer["kernel"], precision=PRECISION)
    return y + layer["bias"][None, :] if layer.get("bias") is not None else y


def _rotate(x: jax.Array, phase: jax.Array) -> jax.Array:
    """x [T, heads, D]: dimension i turns with dimension i + D/2, by phase[t, i]."""
    first, second = jnp.split(x, 2, axis=2)
    cos, sin = jnp.cos(phase)[:, None], jnp.sin(phase)[:, None]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=2)


def _attention(
    config: ModelConfig, attn: dict[str, Any], x: jax.Array, phase: jax.Array
) -> jax.Array:
    """Every token over itself and all before it; x [T, E]."""
    num_tokens, size = len(x), config.head_dim
    q = _rotate(_linear(attn["q"], x).reshape(num_tokens, -1, size), phase)
    k = _rotate(_linear(attn["k"], x).reshape(num_tokens, -1, size), phase)
    v = _linear(attn["v"], x).reshape(num_tokens, -1, size)
    group = config.num_heads // config.num_kv_heads
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    scores = jnp.einsum("qhd,khd->hqk", q, k, precision=PRECISION)
    seen = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))[None]
    weights = jax.nn.softmax(jnp.where(seen, scores / size**0.5, -jnp.inf), axis=2)
    mixed = jnp.einsum("hqk,khd->qhd", weights, v, precision=PRECISION)
    return _linear(attn["o"], mixed.reshape(num_tokens, -1))
