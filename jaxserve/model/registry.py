"""Model families by architecture name, and the model as functions over a plain params dict.

`ModelFunctions` is all that the device layer knows of a model: it merges params into the NNX graph inside a trace.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.model.attention import PagedRows
from jaxserve.model.llama import Llama
from jaxserve.model_config import ModelConfig
from pallas_kernels.ragged_paged_attention.layout import KVPages

ARCHITECTURES: dict[str, type[Llama]] = {"llama": Llama}

Params = dict[str, Any]  # nested dict of arrays


@dataclass(frozen=True)
class ModelFunctions:
    """A model without its weights.

    Args:
        config: shapes and constants.
        graph: the NNX graph definition.
        abstract_params: nested dict of `jax.ShapeDtypeStruct`: what `hidden` and `logits` expect as params.
    """

    config: ModelConfig
    graph: nnx.GraphDef
    abstract_params: Params

    def hidden(
        self,
        params: Params,
        token_ids: jax.Array,
        positions: jax.Array,
        rows: PagedRows,
        kv_pages: list[KVPages],
    ) -> tuple[jax.Array, list[KVPages]]:
        """See `Llama.hidden`."""
        return nnx.merge(self.graph, params).hidden(token_ids, positions, rows, kv_pages)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """See `Llama.logits`."""
        return nnx.merge(self.graph, params).logits(hidden)


def build_model(config: ModelConfig, dtype: jnp.dtype, backend: str) -> ModelFunctions:
    """The functions of a model; nothing is allocated.

    Args:
        config: shapes and constants.
        dtype: of weights, activations and KV.
        backend: attention backend, a name of `pallas_kernels.dispatch`.
    """
    family = ARCHITECTURES[config.architecture]
    graph, state = nnx.split(nnx.eval_shape(lambda: family(config, dtype, backend)))
    return ModelFunctions(config=config, graph=graph, abstract_params=nnx.to_pure_dict(state))
