"""The arguments of a call in groups, as `api` hands them to a backend's `attend`.

    attend(q, k_new, v_new, kv, rows, scales, sinks, *, options, blocks, interpret) -> (out, kv, lse)

Invariant: they are checked; a backend that has no use for one says so.
"""

import dataclasses
from typing import Any, NamedTuple


class Rows(NamedTuple):
    """Where each row stands, as in `api.ragged_paged_attention`; traced."""

    kv_lens: Any  # i32[S]
    page_table: Any  # i32[S * P]
    kv_starts: Any  # i32[S]
    cu_q_lens: Any  # i32[S + 1]
    ranges: Any  # i32[3]


class Scales(NamedTuple):
    """The value of one unit of an 8-bit pool, by KV head; traced. None for other pools."""

    k: Any  # f32[K] | None
    v: Any  # f32[K] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is known when the program is compiled, as in `api.ragged_paged_attention`."""

    sm_scale: float
    window: int | None
    soft_cap: float | None
    return_lse: bool
