"""What element types named "auto" mean here.

Called by `weights.load_model` and `build`. Apart from the other choices because weights are read while
the modules that those need are still being imported.
"""

import jax
import jax.numpy as jnp

from jaxserve.config import KV_CACHE_DTYPES


def resolve_dtype(name: str) -> jnp.dtype:
    """The dtype of weights and activations; "auto" is float32 on CPU, where it is the fast one,
    bfloat16 elsewhere.
    """
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def resolve_kv_dtype(name: str, dtype: jnp.dtype) -> jnp.dtype:
    """The element type of the pages by its name in the settings; "auto" is the model's `dtype`."""
    return jnp.dtype(KV_CACHE_DTYPES[name] or dtype)
