"""Named shapes, shared by tests, benchmarks and tuning: heads and steps of real models, and `CASES`,
small calls that are awkward in one way each.

Invariant: a name means the same shapes everywhere, so that a number measured under it can be compared.
"""

import dataclasses
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """The attention heads of one model.

    Args:
        num_heads: H, query heads.
        num_kv_heads: K.
        head_dim: D.
        num_layers: L.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One step: rows that are all alike.

    Args:
        num_rows: live rows.
        num_tokens: new tokens in each.
        context: tokens of context in each, the new ones included.
    """

    num_rows: int
    num_tokens: int
    context: int

    def rows(self, page_size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Row arrays of the step, as `page_rows`."""
        counts, contexts = [self.num_tokens] * self.num_rows, [self.context] * self.num_rows
        return page_rows(counts, contexts, page_size, rng)


HEADS = {
    "smollm2-135m": HeadSpec(num_heads=9, num_kv_heads=3, head_dim=64, num_layers=30),
    "smollm2-360m": HeadSpec(num_heads=15, num_kv_heads=5, head_dim=64, num_layers=32),
    "llama-3.2-1b": HeadSpec(num_heads=32, num_kv_heads=8, head_dim=64, num_layers=16),
    "llama-3.1-8b": HeadSpec(num_heads=32, num_kv_heads=8, head_dim=128, num_layers=32),
    "tiny": HeadSpec(num_heads=9, num_kv_heads=3, head_dim=64, num_layers=2),
}

STEPS = {
    "decode-b1-c512": StepSpec(num_rows=1, num_tokens=1, context=512),
    "decode-b16-c256": StepSpec(num_rows=16, num_tokens=1, context=256),
    "decode-b32-c256": StepSpec(num_rows=32, num_tokens=1, context=256),
    "decode-b16-c1024": StepSpec(num_rows=16, num_tokens=1, context=1024),
    "chunk-512-c512": StepSpec(num_rows=1, num_tokens=512, context=512),
    "chunk-512-c2048": StepSpec(num_rows=1, num_tokens=512, context=2048),
    "chunk-8x64": StepSpec(num_rows=8, num_tokens=64, context=64),
}

# Large enough to fill an accelerator.
LARGE_STEPS = {
    "decode-b1-c8192": StepSpec(num_rows=1, num_tokens=1, context=8192),
    "decode-b16-c1024": STEPS["decode-b16-c1024"],
    "decode-b64-c4096": StepSpec(num_rows=64, num_tokens=1, context=4096),
    "decode-b256-c1024": StepSpec(num_rows=256, num_tokens=1, context=1024),
    "chunk-512-c2048": STEPS["chunk-512-c2048"],
    "chunk-2048-c2048": StepSpec(num_rows=1, num_tokens=2048, context=2048),
    "chunk-2048-c16384": StepSpec(num_rows=1, num_tokens=2048, context=16384),
    "chunk-32x64": StepSpec(num_rows=32, num_tokens=64, context=64),
}


class Length(NamedTuple):
    """A number of tokens that has the same corners whatever the page size."""

    pages: int
    tokens: int  # more, or less, than those pages hold

    def at(self, page_size: int) -> int:
        """Tokens at a page size."""
        return self.pages * page_size + self.tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseSpec:
    """A call small enough for an interpreter. Page size and dtype are whoever runs it's to choose.

    Args:
        rows: (new tokens, context including them) of each row, single-token rows first.
        heads: (H, K, D).
        kv_dtype: element type of an 8-bit pool; None for that of the queries.
        starts: first page of each row that is still there (`kv_starts`, in pages); () for zeros.
        freed: rows whose first page is gone: the null page stands in its place, before the window.
        shared: whether rows 0 and 1 share their first page.
        spoilt: whether a live slot of row 0 holds NaN: its own result is NaN, no other row's is.
        owns_last_page: whether row 0 owns the last page of the pool.
        writes: whether there are new keys and values; else the pages hold them already.
        sinks: whether there are sinks.
        window, soft_cap: options of the call.
    """

    rows: tuple[tuple[Length, Length], ...]
    heads: tuple[int, int, int] = (4, 2, 64)
    kv_dtype: str | None = None
    starts: tuple[int, ...] = ()
    freed: tuple[int, ...] = ()
    shared: bool = False
    spoilt: bool = False
    owns_last_page: bool = False
    writes: bool = True
    sinks: bool = False
    window: int | None = None
    soft_cap: float | None = None


ONE = Length(0, 1)
PAGE = Length(1, 0)
_MIXED = (
    (ONE, Length(2, 0)),
    (ONE, Length(0, 3)),
    (Length(0, 2), Length(1, 1)),
    (Length(0, 5), Length(2, 3)),
)
_SHORT = ((ONE, Length(1, 2)), (Length(0, 3), Length(1, 1)))

# Each is run with room for more rows and tokens than it has, all padding, and with NaN in everything
# that nobody may read: unwritten slots of its pages, pages that nobody owns, the null page.
CASES = {
    "length 1": CaseSpec(rows=((ONE, ONE),)),
    "length of a page": CaseSpec(rows=((ONE, PAGE),)),
    "a page and 1": CaseSpec(rows=((ONE, Length(1, 1)),)),
    "single tokens": CaseSpec(
        rows=tuple((ONE, n) for n in (ONE, PAGE, Length(1, 1), Length(3, 2)))
    ),
    "a chunk, nothing before it": CaseSpec(rows=((Length(1, 2), Length(1, 2)),)),
    "a chunk of a page": CaseSpec(rows=((PAGE, PAGE),)),
    "a chunk after a prefix": CaseSpec(rows=((Length(0, 5), Length(2, 1)),)),
    "mixed": CaseSpec(rows=_MIXED),
    "a row without tokens": CaseSpec(
        rows=((ONE, Length(1, 2)), (Length(0, 0), Length(1, 1)), (Length(0, 3), Length(0, 3)))
    ),
    "all rows padding": CaseSpec(rows=()),
    "the last page of the pool": CaseSpec(rows=_SHORT, owns_last_page=True),
    "shared pages": CaseSpec(rows=((ONE, Length(1, 2)), (Length(0, 2), Length(2, 1))), shared=True),
    "NaN of one row": CaseSpec(
        rows=((ONE, Length(2, 1)), (ONE, Length(0, 3)), (Length(0, 3), Length(1, 1))), spoilt=True
    ),
    "pages written before": CaseSpec(rows=_SHORT, writes=False),
    "window below a page": CaseSpec(rows=_MIXED, window=3),
    "window of one token": CaseSpec(rows=_SHORT, window=1),
    "window above the length": CaseSpec(rows=_SHORT, window=1000),
    "freed pages before the window": CaseSpec(
        rows=((ONE, Length(2, 2)), (Length(0, 2), Length(2, 3))), window=3, freed=(0, 1)
    ),
    "kv_starts": CaseSpec(
        rows=((ONE, Length(9, 2)), (ONE, Length(0, 3)), (Length(0, 3), Length(7, 1))),
        starts=(8, 0, 5),
    ),
    "kv_starts and a window": CaseSpec(
        rows=((ONE, Length(9, 2)), (Length(0, 3), Length(7, 1))), starts=(7, 5), window=4
    ),
    "soft cap": CaseSpec(rows=_SHORT, soft_cap=1.5),
    "sinks": CaseSpec(rows=_SHORT, sinks=True),
    "window, soft cap and sinks": CaseSpec(rows=_MIXED, window=5, soft_cap=1.5, sinks=True),
    "9 heads over 3": CaseSpec(rows=_SHORT, heads=(9, 3, 64)),
    "mha": CaseSpec(rows=_SHORT, heads=(3, 3, 128)),
    "mqa": CaseSpec(rows=_SHORT, heads=(4, 1, 64)),
    "head_dim 128": CaseSpec(rows=_MIXED, heads=(8, 2, 128)),
    "head_dim 256": CaseSpec(rows=_SHORT, heads=(4, 1, 256)),
    "int8": CaseSpec(rows=_SHORT, heads=(9, 3, 64), kv_dtype="int8"),
    "e4m3": CaseSpec(rows=_SHORT, heads=(4, 2, 128), kv_dtype="float8_e4m3fn"),
    "e5m2": CaseSpec(rows=_SHORT, kv_dtype="float8_e5m2"),
}


def page_rows(
    counts: list[int], contexts: list[int], page_size: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Row arrays of a batch without padding, its pages dealt out at random from page 1 on.

    Args:
        counts: new tokens of each row, single tokens first.
        contexts: tokens of each row, the new ones included.
    """
    needed = [-(-context // page_size) for context in contexts]
    ids = rng.permutation(sum(needed)).astype(np.int32) + 1
    table = np.zeros((len(counts), max(needed)), np.int32)
    taken = 0
    for row, count in enumerate(needed):
        table[row, :count] = ids[taken : taken + count]
        taken += count
    singles = sum(count == 1 for count in counts)
    return {
        "kv_lens": np.array(contexts, np.int32),
        "page_table": table.reshape(-1),
        "kv_starts": np.zeros(len(counts), np.int32),
        "cu_q_lens": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        "ranges": np.array([singles, singles, len(counts)], np.int32),
    }
