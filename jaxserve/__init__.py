"""jaxserve: LLM inference in pure JAX.

`import jaxserve` is light: each name is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.async_engine.thread import AsyncEngine
    from jaxserve.build.from_params import build_engine
    from jaxserve.config import (
        AxisRules,
        CacheConfig,
        EngineConfig,
        ParallelConfig,
        SchedulerConfig,
    )
    from jaxserve.engine import Engine
    from jaxserve.follower import follow_leader
    from jaxserve.llm import LLM
    from jaxserve.model.training import full_forward, init_params
    from jaxserve.model_config import ModelConfig
    from jaxserve.request import Request, RequestOutput
    from jaxserve.sampling_params import BeamParams, SamplingParams
    from jaxserve.score import Score
    from jaxserve.weights.load_model import LoadedModel, load_model
    from jaxserve.weights.restore import restore_params

__version__ = "0.1.0"

_HOME_OF = {
    "AsyncEngine": "jaxserve.async_engine.thread",
    "AxisRules": "jaxserve.config",
    "BeamParams": "jaxserve.sampling_params",
    "CacheConfig": "jaxserve.config",
    "Engine": "jaxserve.engine",
    "EngineConfig": "jaxserve.config",
    "LLM": "jaxserve.llm",
    "LoadedModel": "jaxserve.weights.load_model",
    "ModelConfig": "jaxserve.model_config",
    "ParallelConfig": "jaxserve.config",
    "Request": "jaxserve.request",
    "RequestOutput": "jaxserve.request",
    "SamplingParams": "jaxserve.sampling_params",
    "SchedulerConfig": "jaxserve.config",
    "Score": "jaxserve.score",
    "build_engine": "jaxserve.build.from_params",
    "follow_leader": "jaxserve.follower",
    "full_forward": "jaxserve.model.training",
    "init_params": "jaxserve.model.training",
    "load_model": "jaxserve.weights.load_model",
    "restore_params": "jaxserve.weights.restore",
}
__all__ = [
    "LLM",
    "AsyncEngine",
    "AxisRules",
    "BeamParams",
    "CacheConfig",
    "Engine",
    "EngineConfig",
    "LoadedModel",
    "ModelConfig",
    "ParallelConfig",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "Score",
    "__version__",
    "build_engine",
    "follow_leader",
    "full_forward",
    "init_params",
    "load_model",
    "restore_params",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
