"""The oracle for logits: a Llama forward pass over the full context in plain NumPy, float64, without a cache.

Written from the model's definition and sharing nothing with the package but the file reader, so
that a fault in rope, masks, GQA, weight names or transposes cannot appear on both sides. `forward`
is what tests call.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxserve.model_config import ModelConfig
from jaxserve.rope_config import RopeConfig
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.loader import open_checkpoint


def forward(
    model: Checkpoint | str | Path | tuple[ModelConfig, Mapping[str, np.ndarray]],
    token_ids: Sequence[int],
) -> np.ndarray:
    """Logits after every token.

    Args:
        model: an opened checkpoint, a path to one, or (config, {Hugging Face name: array}).
        token_ids: [T] ids.

    Returns:
        f64[T, V].
    """
    if isinstance(model, str | Path):
        model = open_checkpoint(model)
    if isinstance(model, Checkpoint):
        model = (model.config, dict(model.tensors()))
    config, stored = model
    weights = {name: np.asarray(array, np.float64) for name, array in stored.items()}
    x = weights["model.embed_tokens.weight"][np.asarray(token_ids)]  # [T, E]
    angles = np.arange(len(token_ids))[:, None] * inverse_frequencies(config.rope, config.head_dim)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        y = _rms_norm(x, weights[f"{at}.input_layernorm.weight"], config.rms_norm_eps)
        x = x + _attention(config, weights, f"{at}.self_attn", y, angles)
        y = _rms_norm(x, weights[f"{at}.post_attention_layernorm.weight"], config.rms_norm_eps)
        x = x + _mlp(weights, f"{at}.mlp", y)
    x = _rms_norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return x @ head.T


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural-log probabilities over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def greedy(
    model: Checkpoint | str | Path | tuple[ModelConfig, Mapping[str, np.ndarray]],
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    end_ids: Sequence[int] = (),
) -> tuple[list[int], list[float]]:
    """Greedy continuation by full recompute: (ids, their natural-log probabilities); an end id is
    kept as the last."""
    if isinstance(model, str | Path):
        model = open_checkpoint(model)
    if isinstance(model, Checkpoint):
        model = (model.config, {name: np.asarray(a, np.float64) for name, a in model.tensors()})
    ids, logprobs = list(prompt_token_ids), []
    for _ in range(max_tokens):
        row = log_softmax(forward(model, ids)[-1])
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
        if ids[-1] in end_ids:
            break
    return ids[len(prompt_token_ids) :], logprobs


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """f64[D/2]: radians per position of each rotated pair."""
    plain = 1.0 / rope.theta ** (np.arange(0, head_dim, 2) / head_dim)
    if rope.rope_type == "default":
        return plain
    if rope.rope_type == "linear":
        return plain / rope.factor
    context = rope.original_max_position_embeddings
    result = []
    for frequency in plain:
        turns = context * frequency / (2 * math.pi)  # over the original context
        if turns > rope.high_freq_factor:
            result.append(frequency)
        elif turns < rope.low_freq_factor:
            result.append(frequency / rope.factor)
        else:
            share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            result.append((1 - share) * frequency / rope.factor + share * frequency)
    return np.array(result)


def _rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * scale


def _linear(weights: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """x [T, heads, D]: dimension i turns with dimension i + D/2, by angles[t, i]."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(
    config: ModelConfig,
    weights: Mapping[str, np.ndarray],
    name: str,
    x: np.ndarray,
    angles: np.ndarray,
) -> np.ndarray:
    num_tokens, head_dim = len(x), config.head_dim
    q = _rotate(
        _linear(weights, f"{name}.q_proj", x).reshape(num_tokens, config.num_heads, head_dim),
        angles,
    )
    k = _rotate(
        _linear(weights, f"{name}.k_proj", x).reshape(num_tokens, config.num_kv_heads, head_dim),
        angles,
    )
    v = _linear(weights, f"{name}.v_proj", x).reshape(num_tokens, config.num_kv_heads, head_dim)
    out = np.empty_like(q)
    for head in range(config.num_heads):
        kv_head = head // (config.num_heads // config.num_kv_heads)
        for t in range(num_tokens):
            scores = k[: t + 1, kv_head] @ q[t, head] / math.sqrt(head_dim)
            p = np.exp(scores - scores.max())
            out[t, head] = p / p.sum() @ v[: t + 1, kv_head]
    return _linear(weights, f"{name}.o_proj", out.reshape(num_tokens, -1))


def _mlp(weights: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    gate = _linear(weights, f"{name}.gate_proj", x)
    return _linear(
        weights,
        f"{name}.down_proj",
        gate / (1 + np.exp(-gate)) * _linear(weights, f"{name}.up_proj", x),
    )
