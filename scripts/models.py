"""Shapes of models that are compiled or served with random weights, for the scripts that need one."""

import dataclasses

from jaxserve.model_config import ModelConfig, RopeConfig

LLAMA_3_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope=RopeConfig(
        theta=500000.0, rope_type="llama3", factor=8.0, original_max_position_embeddings=8192
    ),
)
LLAMA_3_70B = dataclasses.replace(
    LLAMA_3_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
)
