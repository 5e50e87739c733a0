"""Models that are compiled or served with random weights, for the scripts that need one."""

import dataclasses

from jaxserve.model_config import ModelConfig, RopeConfig
from jaxserve.plan.models import MODELS, ModelSpec


def _llama_3(spec: ModelSpec) -> ModelConfig:
    shape = dataclasses.asdict(spec)
    del shape["num_extra_layer_params"]  # none: neither biases nor norms of q and k
    return ModelConfig(
        **shape,
        rms_norm_eps=1e-5,
        rope=RopeConfig(
            theta=500000.0, rope_type="llama3", factor=8.0, original_max_position_embeddings=8192
        ),
    )


LLAMA_3_8B = _llama_3(MODELS["llama-3-8b"])
LLAMA_3_70B = _llama_3(MODELS["llama-3-70b"])
