"""Models that are compiled or served with random weights, for the scripts that need one."""

from jaxserve.plan.model_table import CONFIGS

LLAMA_3_8B = CONFIGS["llama-3-8b"]
LLAMA_3_70B = CONFIGS["llama-3-70b"]
