"""Logits and greedy tokens of every family and rope type on tiny random models, by transformers' own
modules in float64; called by `scripts/make_oracles`.

Names and shapes of the weights are those that transformers' modules have; only the values come from
`tests.checkpoints.draw_tensor`. So a test that draws the same weights by our tables of names and reads
them by our loader compares with something that shares neither.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.checkpoints import draw_tensor, family_config

NUM_TOKENS = 40
NUM_PROMPT = 24  # of them, before the greedy tokens
NUM_GREEDY = 12
MIN_GAP = 2e-3  # between the best two logits of a greedy step: float32 cannot turn them round
INITIALIZER_RANGE = 0.2

WINDOW = {"sliding_window": 7}  # well below NUM_TOKENS
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
SHORT = [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0]
LONG = [1.1, 1.5, 2.0, 3.0, 4.5, 6.0, 8.0, 10.0]
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}


def _phi3(longest: int, original: int, **changes: Any) -> dict[str, Any]:
    return family_config(
        "phi3",
        max_position_embeddings=longest,
        original_max_position_embeddings=original,
        **changes,
    )


# name -> its config.json
CASES: dict[str, dict[str, Any]] = {
    "llama": family_config("llama"),
    "llama_biases": family_config("llama", attention_bias=True, mlp_bias=True),
    "llama_odd_sizes": family_config(
        "llama",
        vocab_size=101,
        hidden_size=72,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=1,
        head_dim=20,
        rope_theta=512.5,
    ),
    "llama_linear": family_config("llama", rope_scaling=LINEAR),
    "llama_llama3": family_config("llama", rope_scaling=LLAMA3),
    "llama_yarn": family_config("llama", rope_scaling=YARN),
    "llama_yarn_all_keys": family_config(
        "llama",
        rope_scaling=YARN | {"attention_factor": 0.9, "beta_fast": 8.0, "beta_slow": 0.5},
    ),
    "llama_yarn_mscale": family_config(
        "llama", rope_scaling=YARN | {"mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False}
    ),
    "llama_dynamic_within": family_config(
        "llama", max_position_embeddings=NUM_TOKENS, rope_scaling=DYNAMIC
    ),
    "llama_dynamic_beyond": family_config(
        "llama", max_position_embeddings=16, rope_scaling=DYNAMIC
    ),
    "mistral": family_config("mistral"),
    "mistral_window": family_config("mistral", **WINDOW),
    "mistral_head_dim_v5": family_config(
        "mistral", head_dim=24, rope_theta=None, rope_parameters={"rope_theta": 1e5} | LINEAR
    ),
    "ministral_mixed": family_config("ministral", layer_types=MIXED, **WINDOW),
    "qwen2": family_config("qwen2"),
    "qwen2_window": family_config("qwen2", **QWEN_WINDOW),
    "qwen2_layer_types": family_config("qwen2", layer_types=MIXED, **QWEN_WINDOW),
    "qwen2_window_unused": family_config("qwen2", **QWEN_WINDOW | {"use_sliding_window": False}),
    "qwen2_tied_yarn": family_config("qwen2", tie_word_embeddings=True, rope_scaling=YARN),
    "qwen3": family_config("qwen3", head_dim=32),
    "qwen3_biases": family_config("qwen3", head_dim=24, attention_bias=True),
    "qwen3_window_tied": family_config(
        "qwen3", head_dim=32, tie_word_embeddings=True, **QWEN_WINDOW
    ),
    "qwen3_yarn": family_config("qwen3", head_dim=32, rope_scaling=YARN),
    "smollm3": family_config("smollm3"),
    "smollm3_listed": family_config(
        "smollm3", no_rope_layers=[0, 1, 1, 0], attention_bias=True, mlp_bias=True
    ),
    "smollm3_interval_untied": family_config(
        "smollm3", no_rope_layer_interval=2, tie_word_embeddings=False
    ),
    "smollm3_window": family_config(
        "smollm3", no_rope_layer_interval=2, use_sliding_window=True, **WINDOW
    ),
    "smollm3_yarn": family_config("smollm3", rope_scaling=YARN),
    "phi3": _phi3(512, 512),
    "phi3_window": _phi3(512, 512, **WINDOW),
    "phi3_longrope_within": _phi3(256, 64, rope_scaling=LONGROPE),
    "phi3_longrope_beyond": _phi3(256, 16, rope_scaling=LONGROPE),
    "phi3_partial_tied": _phi3(
        512, 512, partial_rotary_factor=0.5, tie_word_embeddings=True, num_key_value_heads=1
    ),
    "phi3_partial_longrope": _phi3(
        256,
        16,
        partial_rotary_factor=0.75,
        rope_scaling=LONGROPE | {"short_factor": SHORT[:6], "long_factor": LONG[:6]},
    ),
    "granite": family_config(
        "granite",
        embedding_multiplier=6.0,
        residual_multiplier=0.3,
        attention_multiplier=0.11,
        logits_scaling=0.5,
    ),
    "granite_biases": family_config(
        "granite", attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "seed_oss": family_config("seed_oss"),
    "seed_oss_all_biases": family_config(
        "seed_oss", attention_out_bias=True, mlp_bias=True, head_dim=24
    ),
}


def build(hf_config: dict[str, Any], seed: int) -> torch.nn.Module:
    """transformers' model of a config.json with the weights of `draw_tensor`, in float64."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf_config), "utf-8")
        config = AutoConfig.from_pretrained(folder)
    # Eager: its masks of windows are plain to see, and it has no fused kernel for float64 to differ in.
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied head is not listed again
            drawn = draw_tensor(name, parameter.shape, seed, INITIALIZER_RANGE)
            parameter.copy_(torch.tensor(drawn))
    return model


def forward(model: torch.nn.Module, token_ids: list[int]) -> np.ndarray:
    """f64[T, V] of a text from its first token, without a cache."""
    with torch.no_grad():
        return model(torch.tensor(token_ids)[None], use_cache=False).logits[0].numpy()


def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], float]:
    """Greedy tokens by full recompute, and the smallest gap between the best two logits on the way."""
    ids, gap = list(prompt), np.inf
    for _ in range(NUM_GREEDY):
        row = forward(model, ids)[-1]
        second, first = np.sort(row)[-2:]
        gap = min(gap, first - second)
        ids.append(int(row.argmax()))
    return ids[len(prompt) :], float(gap)


def make_families() -> dict[str, np.ndarray]:
    """Of each case its config and seed, a text, f32 logits after each of its tokens, and the greedy
    tokens after its first `NUM_PROMPT`."""
    arrays: dict[str, np.ndarray] = {}
    for first_seed, (name, hf_config) in enumerate(CASES.items()):
        for seed in range(100 * first_seed, 100 * first_seed + 100):
            model = build(hf_config, seed)
            token_ids = (
                np.random.default_rng(seed)
                .integers(0, hf_config["vocab_size"], NUM_TOKENS)
                .tolist()
            )
            following, gap = greedy(model, token_ids[:NUM_PROMPT])
            if gap >= MIN_GAP:
                break
        else:
            raise SystemExit(f"{name}: no seed has clear greedy tokens")
        case = {"config": hf_config, "seed": seed, "initializer_range": INITIALIZER_RANGE}
        arrays[f"{name}/case"] = np.array(json.dumps(case))
        arrays[f"{name}/token_ids"] = np.array(token_ids, np.int32)
        arrays[f"{name}/logits"] = forward(model, token_ids).astype(np.float32)
        arrays[f"{name}/greedy"] = np.array(following, np.int32)
    return arrays
