"""`EngineStats` of several engines as those of one. Called by `ReplicatedEngine.stats`.

Invariant: what is neither added up nor equal is named here; a figure that cannot be added raises.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxserve.stats import BucketStats, EngineStats, RooflineStats

# Equal in all of them, for they have the same settings.
_EQUAL = (
    "page_size",
    "max_num_batched_tokens",
    "token_buckets",
    "row_buckets",
    "max_model_len",
    "attention_backend",
    "attention_interpret",
    "dtype",
    "kv_cache_dtype",
)
_SPECIAL = ("by_bucket", "last_step", "num_replicas", "weights_version", "is_asleep", "roofline")


def merge_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Counters, pages and sequences added up; the last step is of the engine that has run most.

    Args:
        parts: of each engine, at least one.
    """
    busiest = max(parts, key=lambda one: one.num_steps)
    names = [field.name for field in dataclasses.fields(EngineStats)]
    sums: dict[str, Any] = {
        name: sum([getattr(one, name) for one in parts])
        for name in names
        if name not in (*_EQUAL, *_SPECIAL)
    }
    return EngineStats(
        **{name: getattr(parts[0], name) for name in _EQUAL},
        **sums,
        by_bucket=_merge_buckets(parts),
        last_step=busiest.last_step,
        num_replicas=len(parts),
        weights_version=min(one.weights_version for one in parts),
        is_asleep=any(one.is_asleep for one in parts),
        roofline=_merge_rooflines(parts, busiest),
    )


def _merge_rooflines(parts: Sequence[EngineStats], busiest: EngineStats) -> RooflineStats | None:
    """Sums over the devices of all of them, so rates and shares are means of one; the last step is of the
    engine that has run most.
    """
    rooflines = [one.roofline for one in parts if one.roofline is not None]
    if busiest.roofline is None or len(rooflines) < len(parts):
        return None
    names = ("step_s", "num_bytes", "num_flops", "least_s")
    sums = {name: sum(getattr(one, name) for one in rooflines) for name in names}
    return dataclasses.replace(busiest.roofline, **sums)


def _merge_buckets(parts: Sequence[EngineStats]) -> dict[int, BucketStats]:
    rungs = sorted({rung for one in parts for rung in one.by_bucket})
    none = BucketStats(0, 0, 0)
    return {
        rung: BucketStats(
            *(
                sum(figures)
                for figures in zip(*(p.by_bucket.get(rung, none) for p in parts), strict=True)
            )
        )
        for rung in rungs
    }
