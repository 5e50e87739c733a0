"""Ragged batches for the attention tests, and a NumPy f64 softmax that shares no code with what it checks.

`make_case` builds a batch as the scheduler would, with a random page assignment, and poisons with
NaN everything that attention must not read: padding tokens, unwritten slots, pages nobody owns, the
null page.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention import KVPages
from pallas_kernels.ragged_paged_attention.arg_specs import CaseSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call's arguments (NumPy), the pages as they were before and as they must be after."""

    q: np.ndarray  # [T, H, D]
    k_new: np.ndarray  # [T, K, D]
    v_new: np.ndarray  # [T, K, D]
    before: np.ndarray  # [N, K, 2, page, D] canonical
    after: np.ndarray  # [N, K, 2, page, D] canonical; page 0 is not to be compared
    kv_lens: np.ndarray  # i32[S]
    page_table: np.ndarray  # i32[S*P]
    kv_starts: np.ndarray  # i32[S]
    cu_q_lens: np.ndarray  # i32[S+1]
    ranges: np.ndarray  # i32[3]
    k_scale: np.ndarray | None
    v_scale: np.ndarray | None


def quantise(x, scale, dtype):
    """What the pool must hold for f32 values x [.., K, D] (NumPy)."""
    if scale is None:
        return x.astype(dtype)
    y = x.astype(np.float32) / scale[:, None]
    if np.dtype(dtype) == np.int8:
        return np.clip(np.round(y), -128, 127).astype(dtype)
    limit = float(ml_dtypes.finfo(dtype).max)
    return np.clip(y, -limit, limit).astype(dtype)


def make_case(
    rows,
    *,
    seed=0,
    num_tokens=None,
    num_rows=None,
    num_pages=None,
    pages_per_row=None,
    page=4,
    heads=(4, 2),
    head_dim=32,
    dtype="float32",
    kv_dtype=None,
    starts=None,
    shared=False,
    owns_last_page=False,
) -> Case:
    """Build a batch.

    Args:
        rows: (new tokens, context length) per row, single-token rows first.
        num_tokens, num_rows, num_pages, pages_per_row: the bucket; None takes the least that holds the rows.
        starts: absolute position of each row's first page, or None for zeros.
        shared: rows 0 and 1 have the same first page.
        owns_last_page: row 0 has the last page of the pool.
    """
    rng = np.random.default_rng(seed)
    kv_dtype = kv_dtype or dtype
    starts = list(starts or [0] * len(rows))
    needed = [-(-(length - s) // page) for (_, length), s in zip(rows, starts, strict=True)]
    num_tokens = num_tokens or max(1, sum(n for n, _ in rows))
    num_rows = num_rows or max(1, len(rows))
    pages_per_row = pages_per_row or max([1, *needed])
    num_pages = num_pages or 2 + sum(needed)
    num_heads, kv_heads = heads
    eight_bit = np.dtype(kv_dtype).itemsize == 1
    k_scale = rng.uniform(0.01, 0.03, kv_heads).astype(np.float32) if eight_bit else None
    v_scale = rng.uniform(0.01, 0.03, kv_heads).astype(np.float32) if eight_bit else None

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

    q = normal(num_tokens, num_heads, head_dim)
    k_new, v_new = normal(num_tokens, kv_heads, head_dim), normal(num_tokens, kv_heads, head_dim)
    for packed in (q, k_new, v_new):
        packed[sum(n for n, _ in rows) :] = np.nan  # padding tokens
    poison = 77 if np.dtype(kv_dtype) == np.int8 else np.nan
    before = np.full((num_pages, kv_heads, 2, page, head_dim), poison, np.float32).astype(kv_dtype)
    table = np.zeros((num_rows, pages_per_row), np.int32)
    free = list(rng.permutation(np.arange(1, num_pages)))
    if owns_last_page:
        free.remove(num_pages - 1)
        free.append(num_pages - 1)
    writes = []
    token = 0
    for r, ((new, length), start, count) in enumerate(zip(rows, starts, needed, strict=True)):
        table[r, :count] = [free.pop() for _ in range(count)]
        if shared and r == 1:
            table[1, 0] = table[0, 0]
        for i in range(length - start):
            place = table[r, i // page], slice(None), slice(None), i % page
            if start + i < length - new:
                old = normal(2, kv_heads, head_dim)
                before[place] = np.stack(
                    [quantise(old[0], k_scale, kv_dtype), quantise(old[1], v_scale, kv_dtype)],
                    axis=1,
                )
            else:
                writes.append((place, token))
                token += 1
    after = before.copy()
    for place, t in writes:
        k, v = quantise(k_new[t], k_scale, kv_dtype), quantise(v_new[t], v_scale, kv_dtype)
        after[place] = np.stack([k, v], axis=1)

    counts = [n for n, _ in rows] + [0] * (num_rows - len(rows))
    padding = num_rows - len(rows)
    return Case(
        q=q,
        k_new=k_new,
        v_new=v_new,
        before=before,
        after=after,
        kv_lens=np.array([length for _, length in rows] + [0] * padding, np.int32),
        page_table=table.reshape(-1),
        kv_starts=np.array(starts + [0] * padding, np.int32),
        cu_q_lens=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        ranges=np.array([sum(n == 1 for n, _ in rows)] * 2 + [len(rows)], np.int32),
        k_scale=k_scale,
        v_scale=v_scale,
    )


def case_of(spec: CaseSpec, *, page: int, dtype: str) -> Case:
    """The case at a page size and a dtype, in one bucket for all, so that programs are shared."""
    rows = [(new.at(page), context.at(page)) for new, context in spec.rows]
    num_heads, kv_heads, head_dim = spec.heads
    case = make_case(
        rows,
        num_tokens=page + 8,
        num_rows=6,
        pages_per_row=4,
        num_pages=12,
        page=page,
        heads=(num_heads, kv_heads),
        head_dim=head_dim,
        dtype=dtype,
        kv_dtype=spec.kv_dtype,
        starts=[first * page for first in spec.starts],
        shared=spec.shared,
        owns_last_page=spec.owns_last_page,
    )
    table = case.page_table.reshape(6, -1)
    table[list(spec.freed), 0] = 0
    if spec.spoilt:
        place = table[0, 0], slice(None), slice(None), 1
        case.before[place] = case.after[place] = np.nan
    if not spec.writes:
        case = dataclasses.replace(case, before=case.after, k_new=None, v_new=None)
    return case


def oracle(case: Case, *, sm_scale, window=None, soft_cap=None, sinks=None):
    """(out f64[T, H, D], lse f64[T, H]) of the live tokens by a plain f64 softmax; zeros elsewhere."""
    num_tokens, num_heads, head_dim = case.q.shape
    num_rows = len(case.kv_lens)
    kv_heads, page = case.after.shape[1], case.after.shape[3]
    table = case.page_table.reshape(num_rows, -1)
    out = np.zeros((num_tokens, num_heads, head_dim))
    lse = np.zeros((num_tokens, num_heads))
    for r in range(num_rows):
        for t in range(case.cu_q_lens[r], case.cu_q_lens[r + 1]):
            position = case.kv_lens[r] - (case.cu_q_lens[r + 1] - t)
            first = (
                case.kv_starts[r]
                if window is None
                else max(case.kv_starts[r], position - window + 1)
            )
            index = np.arange(first, position + 1) - case.kv_starts[r]
            pair = case.after[table[r, index // page], :, :, index % page].astype(np.float64)
            for h in range(num_heads):
                k = h // (num_heads // kv_heads)
                keys, values = pair[:, k, 0], pair[:, k, 1]
                if case.k_scale is not None:
                    keys, values = keys * float(case.k_scale[k]), values * float(case.v_scale[k])
                scores = keys @ case.q[t, h].astype(np.float64) * sm_scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                every = scores if sinks is None else np.append(scores, float(sinks[h]))
                top = every.max()
                total = np.exp(every - top).sum()
                out[t, h] = (np.exp(scores - top) / total) @ values
                lse[t, h] = top + np.log(total)
    return out, lse


def make_pages(case: Case, backend: str) -> KVPages:
    """The case's pages as backend `backend` lays them out."""
    num_pages, kv_heads, _, page, head_dim = case.before.shape
    kv = KVPages.zeros(
        dispatch.layout_of(backend), num_pages, page, kv_heads, head_dim, case.before.dtype
    )
    return kv.scatter(jnp.arange(num_pages, dtype=jnp.int32), jnp.asarray(case.before))


def array_args(case: Case) -> dict[str, jax.Array | None]:
    """The case's array arguments by name, without q and the pages."""
    names = [
        "k_new",
        "v_new",
        "kv_lens",
        "page_table",
        "kv_starts",
        "cu_q_lens",
        "ranges",
        "k_scale",
        "v_scale",
    ]
    values = {name: getattr(case, name) for name in names}
    return {n: None if v is None else jnp.asarray(v) for n, v in values.items()}
