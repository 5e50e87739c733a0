"""The scheduler's part of `EngineStats`. Called by `Engine.stats`, between two steps."""

from collections import Counter
from itertools import chain
from typing import Any

from jaxserve.schedule.plan import StepPlan
from jaxserve.schedule.scheduler import Scheduler
from jaxserve.stats import BucketStats, StepStats

_TOTALS = (
    "num_queried_tokens",
    "num_hit_tokens",
    "num_prefix_waits",
    "num_prefix_wait_steps",
    "num_forks",
    "num_copied_pages",
    "num_parked_given_up",
    "num_preemptions",
    "num_swaps",
    "num_recomputes",
    "num_swaps_refused",
)


def scheduler_stats(scheduler: Scheduler) -> dict[str, Any]:
    """Fields of `EngineStats`, by name: the gauges, the totals and the limits of a step."""
    kv, counters = scheduler.kv, scheduler.counters
    by_bucket = {
        rung: BucketStats(use.num_steps, use.num_tokens, use.num_padding_tokens)
        for rung, use in counters.by_bucket.items()
    }
    return {
        "num_running": len(scheduler.running),
        "num_waiting": len(scheduler.waiting),
        "num_held": len(scheduler.held),
        "num_pages": kv.pool.num_pages,
        "num_free_pages": kv.pool.num_free,
        "num_cached_pages": kv.num_cached_pages,
        "num_owned_pages": kv.num_owned_pages,
        "num_kv_tokens": num_kv_tokens(scheduler),
        "num_host_pages": kv.host.num_pages,
        "num_free_host_pages": kv.host.num_free,
        "num_steps": counters.num_steps,
        "num_scheduled_tokens": counters.num_tokens,
        "num_padding_tokens": sum(use.num_padding_tokens for use in by_bucket.values()),
        "by_bucket": by_bucket,
        "last_step": None if counters.last_plan is None else step_stats(counters.last_plan),
        "page_size": kv.page_size,
        "max_num_seqs": scheduler.buckets.max_num_seqs,
        "max_num_batched_tokens": scheduler.buckets.max_num_batched_tokens,
        "token_buckets": scheduler.buckets.tokens,
        "row_buckets": scheduler.buckets.rows,
        **{name: getattr(counters, name) for name in _TOTALS},
    }


def step_stats(plan: StepPlan) -> StepStats:
    """What a step was made of."""
    num_decode_tokens = sum(one.num_tokens == 1 for one in plan.slices)
    return StepStats(
        num_seqs=len(plan.slices),
        num_decode_tokens=num_decode_tokens,
        num_chunk_tokens=plan.num_tokens - num_decode_tokens,
        num_padding_tokens=plan.num_padding_tokens,
        num_rows=sum(one.num_samples for one in plan.slices),
        bucket_num_tokens=plan.bucket.num_tokens,
        bucket_num_rows=plan.bucket.num_rows,
        num_moves_out=len(plan.moves_out),
        num_copies=len(plan.copies),
        num_moves_in=len(plan.moves_in),
    )


def num_kv_tokens(scheduler: Scheduler) -> int:
    """Computed tokens in owned pages; one that several sequences share counts once.

    Divided by the slots of these pages it is the KV utilisation. Costs a little per sequence, not
    per page: all pages of a sequence are full but its last ones.
    """
    kv = scheduler.kv
    num_sharing: Counter[int] = Counter()  # of the not quite full pages: how many sequences ...
    num_filled: Counter[int] = Counter()  # ... and the slots used by the one that uses most
    for seq in chain(scheduler.running, scheduler.parked):
        first = seq.num_computed_tokens // kv.page_size
        for index in range(first, len(seq.page_table)):
            page_id = seq.page_table[index]
            filled = max(0, seq.num_computed_tokens - index * kv.page_size)
            num_sharing[page_id] += 1
            num_filled[page_id] = max(num_filled[page_id], filled)
    # Another owner than these, a longer sequence or the tree, has it full.
    num_empty = sum(
        kv.page_size - num_filled[page_id]
        for page_id, count in num_sharing.items()
        if kv.pool.ref_count(page_id) == count
    )
    return kv.num_owned_pages * kv.page_size - num_empty
