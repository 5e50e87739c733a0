"""What a training loop needs of a model that the engine serves: params to begin with, and a forward pass
over whole sequences that can be differentiated. Public, as `jaxserve.init_params` and `full_forward`.

The layers are the engine's own (`model.llama`), around attention without pages. So a training step and
the engine compute the same function, and their logprobs differ by rounding alone.

Invariant: a position depends on those before it in its own row and on nothing else.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxserve.errors import ConfigError
from jaxserve.model.attention import AttentionKernel, PagedRows
from jaxserve.model.layers import PRECISION
from jaxserve.model.registry import ModelFunctions, Params, build_model
from jaxserve.model_config import ModelConfig
from pallas_kernels.ragged_paged_attention.layout import KVPages

_NO_ROWS = PagedRows(kv_lens=None, page_table=None, kv_starts=None, cu_q_lens=None, ranges=None)


def full_forward(
    params: Mapping[str, Any], token_ids: ArrayLike, *, model_config: ModelConfig
) -> Float[Array, "B T V"]:
    """The logits after every token. Pure and differentiable; call it under `jax.jit`.

    Args:
        params: nested mappings of arrays as `model.llama` describes them, all of one dtype.
        token_ids: i32[B, T], from position 0. Rows that are shorter are padded behind their end with
            any ids: what stands there reaches nothing before it.
        model_config: the model's shapes and constants; to do as an engine does, where rope depends on the
            longest text, `model_config.at_context(engine.max_model_len)`.

    Returns:
        f32[B, T, V]. Attention takes f32[B, H, T, T] per layer.

    Raises:
        ConfigError: token_ids that are no integers of two axes.
    """
    tree: Params = jax.tree.map(jnp.asarray, dict(params))
    ids = jnp.asarray(token_ids)
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        found = f"{ids.dtype}{list(ids.shape)}"
        raise ConfigError(f"token_ids must be integers of shape [B, T], got {found}")
    num_rows, num_tokens = ids.shape
    dtype = tree["embed"]["embedding"].dtype
    model = _functions(model_config, dtype, num_rows)
    positions = jnp.tile(jnp.arange(num_tokens, dtype=jnp.int32), num_rows)
    x = model.embed(tree["embed"], ids.reshape(-1))
    no_page = KVPages((), "none", 1, model_config.num_kv_heads, model_config.head_dim, dtype)
    no_pages = [no_page] * model_config.num_layers
    x, _ = model.layers(model.layer_params(tree), no_pages, x, positions, _NO_ROWS)
    logits = model.logits(model.head_params(tree), x)
    return logits.reshape(num_rows, num_tokens, -1)


def init_params(
    model_config: ModelConfig,
    key: jax.Array,
    *,
    dtype: Any = jnp.float32,
    scale: float = 0.02,
) -> Params:
    """Random params to train from: normal with standard deviation `scale`, norms 1, biases 0.

    Args:
        model_config: the model's shapes and constants.
        key: of `jax.random.key`.
        dtype: of every array.
        scale: of the matrices.

    Returns:
        The tree that `full_forward` and `build_engine` take.
    """
    abstract = _functions(model_config, jnp.dtype(dtype), 1).abstract_params
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    keys = jax.random.split(key, len(leaves))

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, own: jax.Array) -> jax.Array:
        name = path[-1].key
        if name == "scale":
            return jnp.ones(leaf.shape, leaf.dtype)
        if name == "bias":
            return jnp.zeros(leaf.shape, leaf.dtype)
        return (scale * jax.random.normal(own, leaf.shape, jnp.float32)).astype(leaf.dtype)

    drawn = [draw(path, leaf, own) for (path, leaf), own in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, drawn)


def _functions(config: ModelConfig, dtype: jnp.dtype, num_rows: int) -> ModelFunctions:
    return build_model(config, dtype, _DenseKernel(backend="dense", num_rows=num_rows))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DenseKernel(AttentionKernel):
    """Attention of whole rows to themselves, in the place of a kernel over pages."""

    num_rows: int

    @property
    def attend(self):
        return functools.partial(_attend, self.num_rows)


def _attend(
    num_rows: int,
    q: Float[Array, "N H D"],
    k: Float[Array, "N K D"],
    v: Float[Array, "N K D"],
    kv: KVPages,
    *_rows: None,
    sm_scale: float,
    window: int | None = None,
    **_options: Any,
) -> tuple[Float[Array, "N H D"], KVPages, None]:
    """As `ragged_paged_attention` for `num_rows` rows of N / num_rows tokens each, and no pages."""
    num_heads, num_kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    num_tokens = q.shape[0] // num_rows
    q = q.reshape(num_rows, num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    k = k.reshape(num_rows, num_tokens, num_kv_heads, head_dim)
    v = v.reshape(num_rows, num_tokens, num_kv_heads, head_dim)
    scores = sm_scale * jnp.einsum(
        "btkgd,bskd->bkgts", q, k, precision=PRECISION, preferred_element_type=jnp.float32
    )
    behind = jnp.arange(num_tokens)[:, None] - jnp.arange(num_tokens)[None, :]
    seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    weights = jax.nn.softmax(jnp.where(seen[None, None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bkgts,bskd->btkgd", weights.astype(v.dtype), v, precision=PRECISION)
    return out.reshape(num_rows * num_tokens, num_heads, head_dim), kv, None
