"""Model families by architecture name, and the model as functions over a plain params dict.

`ModelFunctions` is all that the device layer knows of a model: it merges params into the NNX graphs
inside a trace. The loop over layers takes any run of consecutive layers, so that a caller may
compile all of them as one program or compile a few and call that program again and again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.model.attention import AttentionKernel, PagedRows
from jaxserve.model.kv_scales import KVScales
from jaxserve.model.llama import ModelParts, llama_parts
from jaxserve.model.packed import is_packed, pack_params
from jaxserve.model.rope import inverse_frequencies, rotation
from jaxserve.model_config import ARCHITECTURES as ARCHITECTURE_NAMES
from jaxserve.model_config import LayerKind, ModelConfig
from pallas_kernels.ragged_paged_attention.layout import KVPages

MakeParts = Callable[[ModelConfig, jnp.dtype, AttentionKernel], ModelParts]
ARCHITECTURES: dict[str, MakeParts] = dict.fromkeys(ARCHITECTURE_NAMES, llama_parts)

Params = dict[str, Any]  # nested dict of arrays


@dataclass(frozen=True)
class ModelFunctions:
    """A model without its weights.

    Args:
        config: shapes and constants.
        kernel: which attention kernel, and how it runs.
        graphs: the NNX graph definitions of embedding, block and head, the latter two for plain
            params and for packed ones.
        abstract_params: nested dict of `jax.ShapeDtypeStruct`: what params must look like.
    """

    config: ModelConfig
    kernel: AttentionKernel
    graphs: dict[str, nnx.GraphDef]
    abstract_params: Params

    @property
    def packs(self) -> bool:
        """Whether layers run in C++ with their matrices packed (`model.packed`).

        So on a CPU that has the C++ kernels; not with several devices, which cut each projection by
        its own heads.
        """
        return self.kernel.is_native

    @property
    def served_params(self) -> Params:
        """What programs take: `abstract_params`, packed where the model `packs`."""
        return pack_params(self.abstract_params) if self.packs else self.abstract_params

    def layer_params(self, params: Params) -> list[Params]:
        """One tree per layer, in order."""
        return [params["layers"][i] for i in range(self.config.num_layers)]

    def head_params(self, params: Params) -> Params:
        """The part of the tree that `logits` reads."""
        head = "lm_head" if "lm_head" in params else "embed"
        return {"norm": params["norm"], head: params[head]}

    def embed(self, embed_params: Params, token_ids: jax.Array) -> jax.Array:
        """Token embeddings.

        Args:
            embed_params: params["embed"].
            token_ids: i32[T].

        Returns:
            [T, E].
        """
        return nnx.merge(self.graphs["embed"], embed_params)(token_ids)

    def layers(
        self,
        layer_params: Sequence[Params],
        kv_pages: Sequence[KVPages],
        x: jax.Array,
        positions: jax.Array,
        rows: PagedRows,
        kv_scales: Sequence[KVScales] | None = None,
    ) -> tuple[jax.Array, list[KVPages]]:
        """Runs consecutive layers; the tokens' keys and values go into the pages.

        Args:
            layer_params, kv_pages: one per layer, params plain or packed; pages are donated by the
                caller.
            x: [T, E], the output of the layer before.
            positions: i32[T], absolute.
            rows: where each row stands in the pages.
            kv_scales: one per layer for 8-bit pages, else None.

        Returns:
            ([T, E], the pages of these layers).
        """
        inv_freq = inverse_frequencies(self.config.rope, self.config.head_dim)
        cos, sin = rotation(inv_freq, positions)
        scales = [None] * len(layer_params) if kv_scales is None else kv_scales
        written = []
        for one, kv, scale in zip(layer_params, kv_pages, scales, strict=True):
            graph = self.graphs["packed_block" if is_packed(one) else "block"]
            x, kv = nnx.merge(graph, one)(x, cos, sin, rows, kv, scale)
            written.append(kv)
        return x, written

    def logits(self, head_params: Params, hidden: jax.Array) -> jax.Array:
        """f32[R, V] of hidden rows [R, E]: final norm and head.

        Args:
            head_params: from `head_params`.
            hidden: [R, E], the output of the last layer.
        """
        is_plain = "lm_head" not in head_params or not is_packed(head_params["lm_head"])
        return nnx.merge(self.graphs["head" if is_plain else "packed_head"], head_params)(hidden)


def _refuse_not_computed(config: ModelConfig) -> None:
    """Flags that a config may have and the layers do not compute yet."""
    if any(kind != LayerKind() for kind in config.layer_kinds):
        raise NotImplementedError("sliding windows and layers without rope")
    plain = (1.0, 1.0, None, 1.0)
    multipliers = (
        config.embedding_multiplier,
        config.residual_multiplier,
        config.attention_multiplier,
        config.logits_scaling,
    )
    if config.qk_norm or multipliers != plain:
        raise NotImplementedError("norms of queries and keys, multipliers")
    rope = config.rope
    if rope.rope_type not in ("default", "linear", "llama3") or rope.partial_rotary_factor != 1.0:
        raise NotImplementedError(f"rope_type {rope.rope_type!r}, partial_rotary_factor")


def build_model(config: ModelConfig, dtype: jnp.dtype, kernel: AttentionKernel) -> ModelFunctions:
    """The functions of a model; nothing is allocated.

    Args:
        config: shapes and constants.
        dtype: of weights and activations.
        kernel: which attention kernel, and how it runs.
    """
    _refuse_not_computed(config)
    parts = ARCHITECTURES[config.architecture](config, dtype, kernel)
    graphs: dict[str, nnx.GraphDef] = {}
    trees: dict[str, Mapping[str, Any]] = {}
    for name, make in parts._asdict().items():
        graphs[name], state = nnx.split(nnx.eval_shape(make))
        trees[name] = nnx.to_pure_dict(state)
    layers = dict.fromkeys(range(config.num_layers), trees["block"])
    params = {**trees["head"], "embed": trees["embed"], "layers": layers}
    return ModelFunctions(config, kernel, graphs, params)
