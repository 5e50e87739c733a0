"""Are the kernels right on this device? Fresh random calls against the reference, on the same pages."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention import KVPages, layout, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.arg_specs import page_rows
from scripts.device.report import Deadline, Row

HEADS = [(9, 3, 64), (32, 8, 64), (32, 8, 128), (16, 16, 128), (8, 1, 128), (8, 2, 256)]
OPTIONS = [
    {},
    {"window": 37},
    {"soft_cap": 20.0},
    {"window": 700, "soft_cap": 30.0},
]
KV_DTYPES = ["same", "int8", "float8_e4m3fn"]
LIMITS = {"float32": 2e-5, "bfloat16": 1e-2}


def random_call(
    rng: np.random.Generator,
    number: int,
    dtype: str,
    page_size: int,
    longest: int,
    served: tuple[str, ...] | None,
):
    """(name, heads, KV dtype, options, row arrays, whether there are sinks) nobody has seen before.

    `served` are the dtypes of pages that the backend serves, None for all.
    """
    heads = HEADS[number % len(HEADS)]
    options = OPTIONS[number % len(OPTIONS)]
    kv_dtype = KV_DTYPES[number // 2 % len(KV_DTYPES)]
    if kv_dtype == "same" or (served is not None and kv_dtype not in served):
        kv_dtype = dtype
    singles = int(rng.integers(0, 6))
    chunks = sorted(int(n) for n in rng.integers(2, max(3, longest // 4), rng.integers(1, 4)))
    counts = [1] * singles + chunks
    contexts = [count + int(rng.integers(0, longest)) for count in counts]
    rows = page_rows(counts, contexts, page_size, rng)
    sinks = bool(number % 2)
    name = f"{'/'.join(map(str, heads))} {kv_dtype} {options or ''} rows {counts} of {contexts}"
    return name + (" sinks" if sinks else ""), heads, kv_dtype, options, rows, sinks


def check_attention(
    backend: str,
    *,
    seed: int,
    num_calls: int,
    dtype: str,
    page_size: int,
    longest: int,
    deadline: Deadline,
) -> Iterator[Row]:
    """Random calls: the result, the log-sum-exp and the pages against the reference.

    Unwritten slots and the null page hold NaN.
    """
    rng = np.random.default_rng(seed)
    for number in range(num_calls):
        if deadline.left_s() < 0:
            yield Row(part="attention", name="the rest", figures={"skipped": "out of time"})
            return
        name, heads, kv_dtype, options, rows, sinks = random_call(
            rng, number, dtype, page_size, longest, dispatch.BACKENDS[backend].kv_dtypes
        )
        try:
            figures = _compare(
                backend, rng, heads, dtype, kv_dtype, options, rows, sinks, page_size
            )
        except Exception as error:  # noqa: BLE001 whatever it is, the report wants it
            yield Row(part="attention", name=name, fault=f"{type(error).__name__}: {error}"[:500])
            continue
        worst = max(figures["out_error"], figures["lse_error"])
        sound = worst <= LIMITS[dtype] and figures["pages_equal"]
        yield Row(part="attention", name=name, figures=figures, fault="" if sound else "differs")


def _compare(backend, rng, heads, dtype, kv_dtype, options, rows, sinks, page_size) -> dict:
    num_heads, kv_heads, head_dim = heads
    num_tokens = int(rows["cu_q_lens"][-1])

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)

    args = {name: jnp.asarray(a) for name, a in rows.items()}
    args |= {"q": normal(num_tokens, num_heads, head_dim), "sinks": None}
    args |= {"k_new": normal(num_tokens, kv_heads, head_dim)}
    args |= {"v_new": normal(num_tokens, kv_heads, head_dim)}
    scale = None
    if layout.is_8bit(kv_dtype):
        scale = jnp.asarray(rng.uniform(0.01, 0.03, kv_heads).astype(np.float32))
        args |= {"k_scale": scale, "v_scale": scale}
    if sinks:
        args["sinks"] = jnp.asarray(rng.standard_normal(num_heads, np.float32))
    canonical = _pages(rng, rows, kv_heads, page_size, head_dim, kv_dtype, scale)
    results = {}
    for name in (backend, "reference"):
        kv = KVPages.zeros(
            dispatch.layout_of(name), len(canonical), page_size, kv_heads, head_dim, kv_dtype
        )
        every = jnp.arange(len(canonical), dtype=jnp.int32)
        kv = kv.scatter(every, canonical)
        call = functools.partial(
            ragged_paged_attention,
            sm_scale=head_dim**-0.5,
            backend=name,
            return_lse=True,
            **options,
        )
        out, kv, lse = jax.jit(call, donate_argnames="kv")(kv=kv, **args)
        pages = np.asarray(kv.gather(every)[1:].astype(jnp.float32))
        results[name] = np.asarray(out, np.float64), np.asarray(lse, np.float64), pages
    (out, lse, pages), (want, want_lse, want_pages) = results[backend], results["reference"]
    largest = np.abs(want).max(axis=-1, keepdims=True)
    return {
        "out_error": float((np.abs(out - want) / largest).max()),
        "lse_error": float((np.abs(lse - want_lse) / np.maximum(1, np.abs(want_lse))).max()),
        "pages_equal": bool(np.array_equal(pages, want_pages, equal_nan=True)),
    }


def _pages(rng, rows, kv_heads, page_size, head_dim, kv_dtype, scale):
    """Canonical pages with random contents in the rows' written slots and NaN in all others."""
    num_rows = len(rows["kv_lens"])
    table = rows["page_table"].reshape(num_rows, -1)
    shape = (int(table.max()) + 1, kv_heads, 2, page_size, head_dim)
    written = np.zeros((shape[0], page_size), bool)
    counts = np.diff(rows["cu_q_lens"])
    for row in range(num_rows):
        old = np.arange(rows["kv_lens"][row] - counts[row])
        written[table[row, old // page_size], old % page_size] = True
    values = rng.standard_normal(shape, np.float32)
    if scale is not None:
        values /= np.asarray(scale)[None, :, None, None, None]
    poison = 77 if kv_dtype == "int8" else np.nan
    values = np.where(written[:, None, None, :, None], values, poison)
    if kv_dtype == "int8":
        values = np.clip(np.round(values), -128, 127)
    return jnp.asarray(values.astype(np.float32)).astype(kv_dtype)
