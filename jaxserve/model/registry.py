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
from jaxserve.model.packed import LayerLayout, is_packed, pack_params
from jaxserve.model.rope import inverse_frequencies, rotation
from jaxserve.model.sharding import Shares, shared_config
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
        given_params: the same in the checkpoint's shapes, which differ from those that devices serve
            together (`sharding.shared_config`).
    """

    config: ModelConfig
    kernel: AttentionKernel
    graphs: dict[str, nnx.GraphDef]
    abstract_params: Params
    given_params: Params

    @property
    def packs(self) -> bool:
        """Whether layers run in C++ with their matrices packed (`model.packed`).

        So on a CPU that has the C++ kernels; not with several devices, which cut each projection by
        its own heads.
        """
        return self.kernel.is_native

    @property
    def layout(self) -> LayerLayout | None:
        """How layers are packed; None where they are not."""
        return LayerLayout.of(self.config) if self.packs else None

    @property
    def served_params(self) -> Params:
        """What programs take: `abstract_params`, packed where the model `packs`."""
        layout = self.layout
        return self.abstract_params if layout is None else pack_params(self.abstract_params, layout)

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
        embedded = nnx.merge(self.graphs["embed"], embed_params)(token_ids)
        multiplier = self.config.embedding_multiplier
        return embedded if multiplier == 1.0 else embedded * multiplier

    def layers(
        self,
        layer_params: Sequence[Params],
        kv_pages: Sequence[KVPages],
        x: jax.Array,
        positions: jax.Array,
        rows: PagedRows,
        kv_scales: Sequence[KVScales] | None = None,
        *,
        kinds: Sequence[LayerKind] | None = None,
    ) -> tuple[jax.Array, list[KVPages]]:
        """Runs consecutive layers; the tokens' keys and values go into the pages.

        Args:
            layer_params, kv_pages: one per layer, params plain or packed; pages are donated by the
                caller.
            x: [T, E], the output of the layer before.
            positions: i32[T], absolute.
            rows: where each row stands in the pages.
            kv_scales: one per layer for 8-bit pages, else None.
            kinds: one per layer, of `config.layer_kinds`; None where these are all layers, or where all
                layers are of one kind.

        Returns:
            ([T, E], the pages of these layers).

        Raises:
            ValueError: layers of several kinds, and not said which these are.
        """
        rope = self.config.rope
        inv_freq = inverse_frequencies(rope, self.config.head_dim)
        turned = rotation(inv_freq, positions, rope.attention_factor)
        unturned = (jnp.zeros((*positions.shape, 1, 0), jnp.float32),) * 2
        scales = [None] * len(layer_params) if kv_scales is None else kv_scales
        kinds = self._kinds(len(layer_params)) if kinds is None else kinds
        written = []
        for one, kv, scale, kind in zip(layer_params, kv_pages, scales, kinds, strict=True):
            graph = self.graphs["packed_block" if is_packed(one) else "block"]
            cos, sin = turned if kind.has_rope else unturned
            x, kv = nnx.merge(graph, one)(x, cos, sin, rows, kv, scale, kind.window)
            written.append(kv)
        return x, written

    def _kinds(self, num_layers: int) -> Sequence[LayerKind]:
        """Of a run of that many layers, which its caller did not say."""
        kinds = self.config.layer_kinds
        if num_layers != len(kinds) and len(set(kinds)) > 1:
            raise ValueError(
                f"kinds: {num_layers} of {len(kinds)} layers, which differ: say which they are"
            )
        return kinds[:num_layers]

    def logits(self, head_params: Params, hidden: jax.Array) -> jax.Array:
        """f32[R, V] of hidden rows [R, E]: final norm and head.

        Args:
            head_params: from `head_params`.
            hidden: [R, E], the output of the last layer.
        """
        is_plain = "lm_head" not in head_params or not is_packed(head_params["lm_head"])
        graph = self.graphs["head" if is_plain else "packed_head"]
        logits = nnx.merge(graph, head_params)(hidden)
        scaling = self.config.logits_scaling
        return logits if scaling == 1.0 else logits / scaling


def build_model(
    config: ModelConfig,
    dtype: jnp.dtype,
    kernel: AttentionKernel,
    shares: Shares | None = None,
) -> ModelFunctions:
    """The functions of a model; nothing is allocated.

    Args:
        config: shapes and constants, of the checkpoint.
        dtype: of weights and activations.
        kernel: which attention kernel, and how it runs.
        shares: over how many devices the model is cut; None = it is whole.

    Raises:
        ConfigError: they cannot share it; as `shared_config`.
    """
    served = shared_config(config, shares or Shares())
    graphs, params = _graphs(served, dtype, kernel)
    given = params if served == config else _graphs(config, dtype, kernel)[1]
    return ModelFunctions(served, kernel, graphs, params, given)


def _graphs(
    config: ModelConfig, dtype: jnp.dtype, kernel: AttentionKernel
) -> tuple[dict[str, nnx.GraphDef], Params]:
    """(the graph definition of each part, abstract params of the whole)."""
    parts = ARCHITECTURES[config.architecture](config, dtype, kernel)
    graphs: dict[str, nnx.GraphDef] = {}
    trees: dict[str, Mapping[str, Any]] = {}
    for name, make in parts._asdict().items():
        graphs[name], state = nnx.split(nnx.eval_shape(make))
        trees[name] = nnx.to_pure_dict(state)
    layers = dict.fromkeys(range(config.num_layers), trees["block"])
    return graphs, {**trees["head"], "embed": trees["embed"], "layers": layers}
