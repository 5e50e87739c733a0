"""What an 8-bit KV cache costs: the logprobs of given texts through the paged model functions."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import KV_CACHE_DTYPES
from jaxserve.device.choices import layers_per_program
from jaxserve.model.attention import AttentionKernel, PagedRows
from jaxserve.model.kv_scales import KVScales
from jaxserve.model.registry import ModelFunctions, Params, build_model
from jaxserve.weights.loader import load_params, open_checkpoint
from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention.layout import KVPages

BACKEND, PAGE_SIZE = "xla", 16


class Model(NamedTuple):
    functions: ModelFunctions
    params: Params


def load(path: Path) -> Model:
    """A checkpoint in float32, on the device."""
    params, config = load_params(open_checkpoint(path), np.float32)
    functions = build_model(config, jnp.dtype("float32"), AttentionKernel(backend=BACKEND))
    return Model(functions, jax.device_put(params))


def text_logprobs(
    model: Model,
    texts: Sequence[Sequence[int]],
    kv_cache_dtype: str = "float32",
    scales: Sequence[KVScales] | None = None,
) -> np.ndarray:
    """The natural-log probability of each token of each text but the first, given those before it.

    All texts are rows of one call, so every key and value is read back from the pages.

    Args:
        model: from `load`.
        texts: token ids.
        kv_cache_dtype: of the pages.
        scales: one per layer where that is an 8-bit type.

    Returns:
        f32[sum of (length - 1)], text by text.
    """
    texts = sorted(texts, key=len)
    lengths = np.array([len(text) for text in texts])
    num_pages = -(-lengths // PAGE_SIZE)
    table = np.zeros((len(texts), num_pages.max()), np.int32)
    for row, end in enumerate(np.cumsum(num_pages)):
        table[row, : num_pages[row]] = np.arange(end - num_pages[row], end) + 1
    rows = PagedRows(
        kv_lens=jnp.asarray(lengths, jnp.int32),
        page_table=jnp.asarray(table.reshape(-1)),
        kv_starts=jnp.zeros(len(texts), jnp.int32),
        cu_q_lens=jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32),
        ranges=jnp.array([0, 0, len(texts)], jnp.int32),
    )
    ids = jnp.asarray(np.concatenate(texts), jnp.int32)
    positions = jnp.asarray(np.concatenate([np.arange(n) for n in lengths]), jnp.int32)
    logprobs = np.asarray(
        _forced(model, ids, positions, rows, int(num_pages.sum()) + 1, kv_cache_dtype, scales)
    )
    return np.delete(logprobs, np.cumsum(lengths)[:-1] - 1)


def _forced(model, ids, positions, rows, num_pages, kv_cache_dtype, scales):
    """f32[T - 1]: the logprob of token t + 1 in row t of the packed batch."""
    functions, params = model
    config = functions.config
    one = KVPages.zeros(
        dispatch.layout_of(BACKEND),
        num_pages,
        PAGE_SIZE,
        config.num_kv_heads,
        config.head_dim,
        KV_CACHE_DTYPES[kv_cache_dtype],
    )
    step = layers_per_program(config.layer_kinds)
    run = jax.jit(functions.layers)
    x = jax.jit(functions.embed)(params["embed"], ids)
    layers = functions.layer_params(params)
    for begin in range(0, len(layers), step):
        which = slice(begin, begin + step)
        some = None if scales is None else scales[which]
        x, _ = run(layers[which], [one] * step, x, positions, rows, some)

    @jax.jit
    def logprobs(head, x):
        rows = jax.nn.log_softmax(functions.logits(head, x[:-1]))
        return jnp.take_along_axis(rows, ids[1:, None], axis=1)[:, 0]

    return logprobs(functions.head_params(params), x)
