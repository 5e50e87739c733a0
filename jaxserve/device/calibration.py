"""Finds the scales of an 8-bit KV cache: those that came with the model, the others by calibration.

Called by `build` once, before anything of the engine is compiled. Calibration runs one text through
the model's own functions with float pages, reads the pages back in their canonical format and takes
the largest magnitude of each kv head, for keys and for values:

    scale[k] = margin * max |x[k]| / largest unit        127 for int8, 448 for float8_e4m3fn

Invariants: the same model, ids and dtype give the same scales whatever the engine is told, so the
portable attention backend runs here and not the one that serves; every scale found is finite and
above 0, or nothing is served.
"""

import functools
import logging
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import KV_CACHE_DTYPES
from jaxserve.device.placement import DEFAULT_DEVICE, WHOLE, Placement
from jaxserve.device.programs import Program, ProgramTable
from jaxserve.errors import ConfigError, shown
from jaxserve.model.attention import AttentionKernel, PagedRows
from jaxserve.model.kv_scales import GivenKVScales, KVScales, check_given, largest_unit
from jaxserve.model.registry import ModelFunctions, Params, build_model
from jaxserve.model.sharding import repeat_heads, shared_config
from jaxserve.model_config import LayerKind, ModelConfig
from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention.layout import KVPages

_LOG = logging.getLogger(__name__)

# Other texts reach higher than ours, and what lies beyond is cut off. Room costs int8 precision and
# a floating-point type none, so fp8 gets more of it; docs/kv_cache.md has the figures.
MARGINS = {"int8": 1.25, "fp8_e4m3": 2.0}
BACKEND = "xla"  # serves every platform, dtype and head_dim
PAGE_SIZE = 64


def find_kv_scales(
    kv_cache_dtype: str,
    *,
    given: GivenKVScales | None,
    config: ModelConfig,
    params: Params,
    dtype: jnp.dtype,
    token_ids: Sequence[int],
    layers_per_program: int,
    placement: Placement = DEFAULT_DEVICE,
) -> list[KVScales]:
    """The scales of every layer, on the device; says in the log how many came from where.

    Args:
        kv_cache_dtype: "int8" or "fp8_e4m3".
        given: scales that came with the model; what they lack is calibrated, all of it where None.
        config: the model's shapes and constants.
        params: its weights, as they are served.
        dtype: of weights and activations.
        token_ids: from `calibration_text.calibration_ids`.
        layers_per_program: consecutive layers compiled as one program; divides the number of layers.
        placement: the devices that have the params.

    Returns:
        One KVScales of f32[K] arrays per layer.

    Raises:
        ConfigError: a given scale that does not fit, or keys or values that are not finite.
    """
    if given is not None and not isinstance(given, GivenKVScales):
        raise ConfigError(f"kv_scales must be GivenKVScales or None, got {shown(given)}")
    known = [KVScales()] * config.num_layers
    if given is not None:
        if given.kv_cache_dtype != kv_cache_dtype:
            raise ConfigError(
                f"kv_cache_dtype={kv_cache_dtype}: the model comes with kv_scales of "
                f"{given.kv_cache_dtype}; without them (kv_scales=None) they are calibrated"
            )
        known = check_given(given, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads)
    served = shared_config(config, placement.shares)
    known = [
        KVScales(*(repeat_heads(one, served.num_kv_heads) for one in layer)) for layer in known
    ]
    num_missing = sum(scale is None for layer in known for scale in layer)
    how = ""
    if num_missing:
        begin = time.monotonic()
        kernel = AttentionKernel(
            backend=BACKEND, mesh=placement.kernel_mesh, axis=placement.rules.heads
        )
        model = build_model(config, dtype, kernel, placement.shares)
        magnitudes = largest_magnitudes(
            model, params, dtype, token_ids, layers_per_program, placement
        )
        known = [
            _completed(kv_cache_dtype, layer, scales, magnitudes[layer])
            for layer, scales in enumerate(known)
        ]
        how = f" on {len(token_ids)} tokens in {time.monotonic() - begin:.1f} s"
    _LOG.info(
        "KV scales of %s: %d came with the model, %d calibrated%s (keys and values of %d layers)",
        kv_cache_dtype,
        2 * config.num_layers - num_missing,
        num_missing,
        how,
        config.num_layers,
    )
    return placement.put(known, placement.heads)


def largest_magnitudes(
    model: ModelFunctions,
    params: Params,
    dtype: jnp.dtype,
    token_ids: Sequence[int],
    layers_per_program: int,
    placement: Placement = DEFAULT_DEVICE,
) -> np.ndarray:
    """How far keys and values of one text reach.

    Args:
        model: the model on a backend that holds pages of its dtype.
        params: its weights, on the device.
        dtype: of weights, activations and the pages.
        token_ids: the text, at least one id.
        layers_per_program, placement: as for `find_kv_scales`.

    Returns:
        f32[L, K, 2]: the largest |key| and |value| of each kv head; infinite where one is
        infinite or NaN.
    """
    num_tokens = len(token_ids)
    num_pages = -(-num_tokens // PAGE_SIZE)
    num_decodes = int(num_tokens == 1)
    rows = PagedRows(
        kv_lens=np.array([num_tokens], np.int32),
        page_table=np.arange(1, num_pages + 1, dtype=np.int32),
        kv_starts=np.zeros(1, np.int32),
        cu_q_lens=np.array([0, num_tokens], np.int32),
        ranges=np.array([num_decodes, num_decodes, 1], np.int32),
    )
    ids, positions, rows = placement.put(
        (np.asarray(token_ids, np.int32), np.arange(num_tokens, dtype=np.int32), rows)
    )
    x = jax.ShapeDtypeStruct((num_tokens, model.config.hidden_size), dtype)
    x, whole = placement.abstract(x), placement.shardings(WHOLE)
    layer_params = model.layer_params(params)
    kinds = model.config.layer_kinds
    runs = [
        slice(begin, begin + layers_per_program)
        for begin in range(0, len(layer_params), layers_per_program)
    ]
    names = {sort: f"layers_{i}" for i, sort in enumerate(dict.fromkeys(kinds[r] for r in runs))}
    table = ProgramTable()
    table.compile_all(
        [
            Program(
                key=(name, num_tokens),
                function=functools.partial(_run_magnitudes, model, sort, num_pages + 1),
                arguments=(layer_params[:layers_per_program], x, positions, rows),
                out_shardings=whole,
            )
            for sort, name in names.items()
        ]
        + [
            Program(
                key=("embed", num_tokens),
                function=model.embed,
                arguments=(params["embed"], ids),
                out_shardings=whole,
            ),
        ]
    )
    x = table["embed", num_tokens](params["embed"], ids)
    found = []
    for run in runs:
        run_layers = table[names[kinds[run]], num_tokens]
        x, magnitudes = run_layers(layer_params[run], x, positions, rows)
        found.append(magnitudes)
    return np.concatenate([np.asarray(one) for one in found])


def _run_magnitudes(
    model: ModelFunctions,
    kinds: Sequence[LayerKind],
    num_pages: int,
    layer_params: Sequence[Params],
    x: jax.Array,
    positions: jax.Array,
    rows: PagedRows,
) -> tuple[jax.Array, jax.Array]:
    """A run of layers over fresh float pages: ([T, E], f32[layers of the run, K, 2])."""
    config = model.config
    fresh = KVPages.zeros(
        dispatch.layout_of(model.kernel.backend),
        num_pages,
        PAGE_SIZE,
        config.num_kv_heads,
        config.head_dim,
        x.dtype,
    )
    x, written = model.layers(
        layer_params, [fresh] * len(layer_params), x, positions, rows, kinds=kinds
    )
    pages = jnp.arange(1, num_pages, dtype=jnp.int32)
    return x, jnp.stack([_largest(kv.gather(pages)) for kv in written])


def _largest(pages: jax.Array) -> jax.Array:
    """f32[K, 2]: the largest magnitude in canonical pages [n, K, 2, page, D]; infinite if one is NaN,
    which a maximum alone may pass over (on CPU it does).
    """
    wide = jnp.abs(pages.astype(jnp.float32))
    return jnp.max(jnp.where(jnp.isfinite(wide), wide, jnp.inf), axis=(0, 3, 4))


def _completed(
    kv_cache_dtype: str, layer: int, known: KVScales, magnitudes: np.ndarray
) -> KVScales:
    """The scales of one layer, what is not known calibrated from magnitudes f32[K, 2]."""
    scales = dict(known._asdict())
    for i, name in enumerate(scales):
        if scales[name] is None:
            tops = magnitudes[:, i].astype(np.float64)
            if not np.isfinite(tops).all():
                kind = "keys" if name == "k" else "values"
                head = int(np.argmin(np.isfinite(tops)))
                raise ConfigError(
                    f"kv_cache_dtype={kv_cache_dtype}: layer {layer}, kv head {head}: {kind} are "
                    "NaN or infinite on the calibration text, so no scale fits them; look for such "
                    "weights, or serve them as they are with kv_cache_dtype=auto"
                )
            scales[name] = scales_of(tops, kv_cache_dtype)
    return KVScales(**scales)


def scales_of(tops: np.ndarray, kv_cache_dtype: str) -> np.ndarray:
    """Scales by which values up to `tops` fit an 8-bit type, with the margin.

    Args:
        tops: [K], the largest magnitude of each kv head, finite.
        kv_cache_dtype: "int8" or "fp8_e4m3".

    Returns:
        f32[K]. A head that is 0 throughout, or too small for a scale in float32, has the scale of a
        head that reaches 1.
    """
    unit = largest_unit(KV_CACHE_DTYPES[kv_cache_dtype])
    scales = MARGINS[kv_cache_dtype] * tops / unit
    return np.where(scales < np.finfo(np.float32).tiny, 1.0 / unit, scales).astype(np.float32)
