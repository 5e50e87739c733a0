"""Models that are compiled or served with random weights, for the scripts that need one."""

from jaxserve.model_config import ModelConfig
from jaxserve.plan.models import MODELS, ModelSpec
from jaxserve.rope_config import RopeConfig


def _llama_3(spec: ModelSpec) -> ModelConfig:
    return ModelConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rms_norm_eps=1e-5,
        rope=RopeConfig(
            theta=500000.0, rope_type="llama3", factor=8.0, original_max_position_embeddings=8192
        ),
    )


LLAMA_3_8B = _llama_3(MODELS["llama-3-8b"])
LLAMA_3_70B = _llama_3(MODELS["llama-3-70b"])
