"""Tiny checkpoints for tests, written by the real writer and so read by the real loader.

- `make_bigram`: logits after a token are what the test says, whatever came before (blind to KV
  faults by design).
- `make_script`: a bigram model that greedily says a fixed text.
- `make_random_llama`: random weights wide enough that every context token matters; compare with
  `numpy_llama`.
- `make_random_model`: the same for a model of any family, each tensor drawn by its name alone, so that
  `scripts/make_oracles` can give the same weights to transformers' own model.
"""

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.hf_config.read import read_hf_config
from jaxserve.weights.hf_directory import write_hf_directory
from jaxserve.weights.name_maps import ParamSpec, param_specs, stored_shapes

SCRIPT_LOGIT = 30.0  # all others are 0, so the next token's probability is 1 - vocab * 1e-13


def make_bigram(
    directory: Path,
    logits: Mapping[int, Mapping[int, float] | Sequence[float] | np.ndarray],
    *,
    vocab_size: int,
    default: Mapping[int, float] | None = None,
    hidden_size: int | None = None,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    max_position_embeddings: int = 512,
    config: Mapping[str, Any] | None = None,
    dtype: Any = np.float32,
    **files: Any,
) -> Path:
    """A Llama whose logits after a token are given in closed form.

    The embedding of a token is one-hot, attention and MLP add zero, the final norm undoes its own
    scaling, and column dim(i) of the head holds the logits wanted after token i. q, k, v, gate and
    up are random: the KV cache is really written and read.

    Args:
        directory: where to write; made if missing.
        logits: for token i, the logits after it: [V], or only the non-zero ones as {token: logit}.
            Write p as log p.
        vocab_size: V.
        default: logits after every token not in `logits`; zeros when None.
        hidden_size: E; None = as many dimensions as needed (one per token of `logits`, one for the rest).
        config: keys of config.json to add or replace.
        files: passed on to `write_hf_directory` (tokenizer_json, tokenizer_config, generation_config, ...).

    Returns:
        directory.
    """
    rows = {token: _dense(row, vocab_size) for token, row in logits.items()}
    shared = len(rows)  # the dimension of every token that has no logits of its own
    hidden = hidden_size or -(-(len(rows) + 1) // 16) * 16
    assert hidden > shared, (
        f"hidden_size {hidden} is too small for {len(rows)} tokens with own logits"
    )
    hf_config = _hf_config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=False,
    ) | dict(config or {})
    tensors = _random_tensors(hf_config, seed=0, initializer_range=0.3)
    embedding = np.zeros((vocab_size, hidden), np.float32)
    embedding[:, shared] = 1
    head = np.zeros((vocab_size, hidden), np.float32)
    head[:, shared] = _dense(default or {}, vocab_size)
    for dim, (token, row) in enumerate(rows.items()):
        embedding[token] = np.eye(hidden)[dim]
        head[:, dim] = row
    for name, array in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", ".bias")):
            array[:] = 0
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = head
    tensors["model.norm.weight"] = np.full(
        hidden, math.sqrt(1 / hidden + hf_config["rms_norm_eps"]), np.float32
    )
    write_hf_directory(
        directory, hf_config, {k: v.astype(dtype) for k, v in tensors.items()}, **files
    )
    return directory


def make_script(
    directory: Path,
    token_ids: Sequence[int],
    *,
    vocab_size: int,
    first_after: Sequence[int] = (),
    end_id: int | None = None,
    **options: Any,
) -> Path:
    """A bigram model in which each listed token makes the next one certain.

    After the last listed token comes end_id (or, without one, uniform noise). Every token that is
    not listed leads to token_ids[0], so any prompt that ends outside the script starts it;
    `first_after` is for prompts that do not.

    Args:
        token_ids: the text to say; every token at most once.
        vocab_size: V.
        first_after: more tokens that lead to token_ids[0].
        end_id: what comes after the last token.
        options: passed on to `make_bigram`.
    """
    assert len(set(token_ids)) == len(token_ids), "a token may occur once per script"
    chain = [*token_ids] if end_id is None else [*token_ids, end_id]
    logits: dict[int, Mapping[int, float]] = {
        token: {following: SCRIPT_LOGIT} for token, following in itertools.pairwise(chain)
    }
    if end_id is None:
        logits[chain[-1]] = {}
    logits |= {token: {token_ids[0]: SCRIPT_LOGIT} for token in first_after}
    return make_bigram(
        directory, logits, vocab_size=vocab_size, default={token_ids[0]: SCRIPT_LOGIT}, **options
    )


def make_random_llama(
    directory: Path,
    config: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    initializer_range: float = 0.1,
    dtype: Any = np.float32,
    **files: Any,
) -> Path:
    """A random Llama: 2 layers, 9 query and 3 kv heads unless `config` (keys of config.json) says otherwise.

    Biases and norms are random too, so that dropping one shows.
    """
    hf_config = _hf_config() | dict(config or {})
    tensors = _random_tensors(hf_config, seed, initializer_range)
    write_hf_directory(
        directory, hf_config, {k: v.astype(dtype) for k, v in tensors.items()}, **files
    )
    return directory


# model_type -> what its config.json has beside `_hf_config`'s sizes. Small numbers, so that windows, bands
# and layers without rope all show within a few tokens.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "ministral": {
        "architectures": ["MinistralForCausalLM"],
        "sliding_window": None,
        "head_dim": 16,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "tie_word_embeddings": True},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "sliding_window": None},
    "granite": {"architectures": ["GraniteForCausalLM"], "attention_bias": False},
    "seed_oss": {"architectures": ["SeedOssForCausalLM"], "head_dim": 16},
}


def family_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model: 4 layers, 4 query and 2 kv heads of 16, 96 tokens.

    Args:
        model_type: of which family.
        changes: keys to add or replace.
    """
    base = {
        "model_type": model_type,
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": "float32",
    }
    return base | _FAMILIES[model_type] | changes


def draw_tensor(name: str, shape: Sequence[int], seed: int, initializer_range: float) -> np.ndarray:
    """A tensor of a random model, f32, by its name: norms near 1, biases as large as what they are
    added to (so that dropping one shows), all else normal with `initializer_range`.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = rng.standard_normal(tuple(shape), np.float32)
    if name.endswith(".bias"):
        return noise
    noise *= np.float32(initializer_range)
    return noise + 1 if "norm" in name else noise


def random_tensors(
    hf_config: Mapping[str, Any], *, seed: int = 0, initializer_range: float = 0.2
) -> dict[str, np.ndarray]:
    """Every stored tensor of a model by Hugging Face name, from `draw_tensor`."""
    config = read_hf_config(hf_config, None, "test config")
    return {
        name: draw_tensor(name, shape, seed, initializer_range)
        for name, shape in stored_shapes(config).items()
    }


def make_random_model(
    directory: Path,
    hf_config: Mapping[str, Any],
    *,
    seed: int = 0,
    initializer_range: float = 0.2,
    **files: Any,
) -> Path:
    """Writes `random_tensors` of a config.json (see `family_config`) in f32.

    Args:
        files: passed on to `write_hf_directory` (tokenizer_json, max_shard_bytes, ...).
    """
    tensors = random_tensors(hf_config, seed=seed, initializer_range=initializer_range)
    write_hf_directory(directory, hf_config, tensors, **files)
    return directory


def _hf_config(**overrides: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    } | overrides


def _random_tensors(
    hf_config: Mapping[str, Any], seed: int, initializer_range: float
) -> dict[str, np.ndarray]:
    config = read_hf_config(hf_config, None, "test config")
    rng = np.random.default_rng(seed)

    def draw(spec: ParamSpec) -> np.ndarray:
        noise = rng.standard_normal(spec.shape, np.float32) * np.float32(initializer_range)
        return noise + 1 if "norm" in spec.name else noise

    return {spec.name: draw(spec) for spec in param_specs(config)}


def _dense(row: Mapping[int, float] | Sequence[float] | np.ndarray, vocab_size: int) -> np.ndarray:
    if not isinstance(row, Mapping):
        row = np.asarray(row, np.float32)
        assert row.shape == (vocab_size,), f"logits must be [{vocab_size}], got {row.shape}"
        return row
    dense = np.zeros(vocab_size, np.float32)
    for token, logit in row.items():
        dense[token] = logit
    return dense
