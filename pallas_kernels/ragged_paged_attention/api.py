"""The one entry to attention: checks the arguments, resolves the backend, calls it.

Called by the model's attention layer inside jit. Invariant: every backend gets the same, already
checked arguments and gives the same result to rounding; what a backend cannot serve is refused
here or there by name.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention.call import Options, Rows, Scales
from pallas_kernels.ragged_paged_attention.layout import KVPages, is_8bit
from pallas_kernels.ragged_paged_attention.row_checks import check_rows


def ragged_paged_attention(
    q: jax.Array,
    k_new: jax.Array | None,
    v_new: jax.Array | None,
    kv: KVPages,
    kv_lens: jax.Array,
    page_table: jax.Array,
    kv_starts: jax.Array | None,
    cu_q_lens: jax.Array,
    ranges: jax.Array,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    sm_scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    blocks: tuple | None = None,
    interpret: object = None,
    debug: bool = False,
) -> tuple[jax.Array, KVPages, jax.Array | None]:
    """Write the new tokens into their pages and attend every token to its row's pages, causally.

    Rows are ordered by number of scheduled tokens, single-token rows first. Tokens beyond
    `cu_q_lens[-1]` are padding: their output is zero, and they write to page 0 only. Unwritten
    slots and page 0 may hold anything, NaN included. The result of a row does not depend on its
    neighbours or the bucket beyond rounding (about 1e-6 in f32). Page ids, lengths and counts are
    trusted, for they are traced, unless `debug` asks for a look at them.

    Args:
        q: [T, H, D] f32 or bf16, packed queries, rotated.
        k_new, v_new: [T, K, D] of q's dtype, or both None when the pages already hold them.
        kv: one layer's pages. Donate it to have it updated in place.
        kv_lens: i32[S], context length in tokens, the new tokens included.
        page_table: i32[S*P], row-major page ids; unused entries 0.
        kv_starts: i32[S], absolute position of the first page in each row, or None for 0.
        cu_q_lens: i32[S+1], cumulative token counts; padded rows repeat the last value.
        ranges: i32[3]: rows with one token, end of the rows with a fixed chunk, rows in all.
        k_scale, v_scale: f32[K], value of one unit of an 8-bit pool; required by it, refused by
            others.
        sinks: f32[H], a logit per head that takes part in the softmax and adds nothing, or None.
        sm_scale: factor on the scores.
        window: a token sees itself and the `window - 1` positions before it, or None for all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap), or None.
        return_lse: also return the log of the softmax's denominator (the sink's part included).
        backend: "auto" or a name in `dispatch.BACKENDS`.
        blocks: block sizes for backends that are tuned by hand; None lets the backend choose.
        interpret: only for Pallas backends: True or the interpreter's own parameters run the kernel
            on the CPU, slowly; None runs it on the device.
        debug: check page ids, lengths and counts (`row_checks.check_rows`) on the host first; under
            jit by a call back to it, whose error arrives as a jax.errors.JaxRuntimeError.

    Returns:
        (out [T, H, D] of q's dtype, the pages with the new tokens written, lse f32[T, H] or None).

    Raises:
        ValueError: an argument whose shape, dtype or value does not fit, or a backend that does
            not ship.
        NotImplementedError: an option, dtype, head_dim or layout that this backend does not serve.
    """
    _check_arrays(q, k_new, v_new, kv, sinks)
    name = dispatch.resolve_backend(backend, _demand(q, kv, backend, interpret))
    _check_rows(kv_lens, page_table, kv_starts, cu_q_lens, ranges)
    _check_scales(kv, k_scale, v_scale)
    dispatch.check_page_size(name, kv.page_size)
    if window is not None and window < 1:
        raise ValueError(f"window={window}: must be at least 1 token, or None")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap}: must be above 0, or None")
    if kv_starts is None:
        kv_starts = jnp.zeros_like(kv_lens)
    rows = Rows(kv_lens, page_table, kv_starts, cu_q_lens, ranges)
    if debug:
        rows = rows._replace(page_table=_checked_table(rows, q.shape[0], kv))
    return dispatch.implementation(name).attend(
        q,
        k_new,
        v_new,
        kv,
        rows,
        Scales(k_scale, v_scale),
        sinks,
        options=Options(sm_scale=sm_scale, window=window, soft_cap=soft_cap, return_lse=return_lse),
        blocks=blocks,
        interpret=interpret,
    )


def _demand(q, kv, backend: str, interpret) -> dispatch.Demand:
    """What the call asks for. Only "auto" looks at the device: a program may be compiled for another."""
    platform = capability = None
    if backend == "auto":
        platform = jax.default_backend()
        capability = getattr(jax.devices()[0], "compute_capability", None)
    return dispatch.Demand(
        platform=platform,
        compute_capability=capability,
        dtype=q.dtype.name,
        kv_dtype=kv.dtype.name,
        head_dim=kv.head_dim,
        layout=kv.layout,
        interpret=bool(interpret),
    )


def _checked_table(rows: Rows, num_tokens: int, kv) -> jax.Array:
    """The page table, once `check_rows` has passed the rows: whoever reads it comes after the check."""
    limits = {"num_tokens": num_tokens, "num_pages": kv.num_pages, "page_size": kv.page_size}

    def check(*arrays):
        arrays = [np.asarray(a) for a in arrays]
        check_rows(*arrays, **limits)
        return arrays[1]

    if not any(isinstance(a, Tracer) for a in rows):
        return jnp.asarray(check(*rows))
    table = rows.page_table
    from pallas_kernels import compat  # all of Pallas, which a backend without it never waits for

    return compat.io_callback(check, jax.ShapeDtypeStruct(table.shape, table.dtype), *rows)


def _expect(name: str, array, shape: tuple[int, ...], dtypes: tuple) -> None:
    if array.shape != shape or array.dtype not in dtypes:
        kinds = " or ".join(jnp.dtype(d).name for d in dtypes)
        raise ValueError(f"{name}: {array.dtype}{list(array.shape)}, expected {kinds}{list(shape)}")


def _check_arrays(q, k_new, v_new, kv, sinks) -> None:
    if q.ndim != 3:
        raise ValueError(f"q: shape {list(q.shape)}, expected [T, H, D]")
    num_tokens, num_heads, head_dim = q.shape
    if not num_tokens or not num_heads:
        raise ValueError(f"q: shape {list(q.shape)}, expected at least one token and one head")
    _expect("q", q, (num_tokens, num_heads, kv.head_dim), (jnp.float32, jnp.bfloat16))
    if num_heads % kv.num_kv_heads:
        raise ValueError(f"q: {num_heads} heads, not a multiple of {kv.num_kv_heads} KV heads")
    if (k_new is None) != (v_new is None):
        raise ValueError("k_new and v_new: give both or neither")
    if k_new is not None:
        new_shape = (num_tokens, kv.num_kv_heads, head_dim)
        _expect("k_new", k_new, new_shape, (q.dtype,))
        _expect("v_new", v_new, new_shape, (q.dtype,))
    if sinks is not None:
        _expect("sinks", sinks, (num_heads,), (jnp.float32,))


def _check_rows(kv_lens, page_table, kv_starts, cu_q_lens, ranges) -> None:
    i32 = (jnp.int32,)
    num_rows = kv_lens.shape[0]
    _expect("kv_lens", kv_lens, (num_rows,), i32)
    _expect("cu_q_lens", cu_q_lens, (num_rows + 1,), i32)
    _expect("ranges", ranges, (3,), i32)
    _expect("page_table", page_table, (page_table.size,), i32)
    if not num_rows or not page_table.size or page_table.size % num_rows:
        raise ValueError(
            f"page_table: {page_table.size} entries, not a positive multiple of {num_rows} rows"
        )
    if kv_starts is not None:
        _expect("kv_starts", kv_starts, (num_rows,), i32)


def _check_scales(kv, k_scale, v_scale) -> None:
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if is_8bit(kv.dtype) != (scale is not None):
            state = "required" if scale is None else "not allowed"
            raise ValueError(f"{name}: {state} with a pool of {kv.dtype}")
        if scale is not None:
            _expect(name, scale, (kv.num_kv_heads,), (jnp.float32,))
