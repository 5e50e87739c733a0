"""Makes a scheduler with its KV manager from a config: used by `jaxserve.build` and by tests and
simulators.
"""

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.errors import ConfigError
from jaxserve.executor import StepCosts
from jaxserve.pages.kv_manager import KVManager
from jaxserve.schedule.admission import GATES
from jaxserve.schedule.buckets import Buckets
from jaxserve.schedule.chunking import ChunkSizes
from jaxserve.schedule.preemption import PreemptionMode
from jaxserve.schedule.queue import POLICIES
from jaxserve.schedule.scheduler import Scheduler


def build_scheduler(
    config: SchedulerConfig,
    cache: CacheConfig,
    *,
    num_pages: int,
    page_size: int,
    max_model_len: int,
    num_host_pages: int = 0,
    costs: StepCosts | None = None,
    kv: KVManager | None = None,
    buckets: Buckets | None = None,
    whole_prompts: bool = False,
) -> Scheduler:
    """A scheduler over an empty pool.

    Args:
        config: limits and policies of a step.
        cache: whether and how pages are cached.
        num_pages: pages in the pool, the null page included.
        page_size: tokens a page.
        max_model_len: most tokens of a sequence.
        num_host_pages: pages in host RAM to swap to; 0 = none.
        costs: what preemption_mode "auto" compares when there are host pages.
        kv: another owner of pages than the usual one, for comparisons.
        buckets: other ladders than those of `config`.
        whole_prompts: never cut a prompt into chunks, for comparisons: the token budget must hold any
            prompt beside a token for everybody else.

    Raises:
        ConfigError: preemption_mode "swap" without host pages.
    """
    if config.preemption_mode == "swap" and num_host_pages == 0:
        raise ConfigError("preemption_mode 'swap' needs room in host RAM: set host_kv_gib")
    buckets = buckets or Buckets.make(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        tokens=config.token_buckets,
        rows=config.row_buckets,
    )
    mode = config.preemption_mode if num_host_pages else "recompute"
    return Scheduler(
        kv=kv
        or KVManager(
            num_pages=num_pages,
            page_size=page_size,
            max_model_len=max_model_len,
            enable_prefix_caching=cache.enable_prefix_caching,
            eviction=cache.eviction,
            num_host_pages=num_host_pages,
        ),
        buckets=buckets,
        gate=GATES[config.scheduling](),
        policy=POLICIES[config.admission](),
        chunk_sizes=_chunk_sizes(config, buckets, whole_prompts),
        preemption=PreemptionMode(mode, costs),
        num_decode_steps=config.num_decode_steps,
    )


def _chunk_sizes(config: SchedulerConfig, buckets: Buckets, whole_prompts: bool) -> ChunkSizes:
    short_first = config.admission == "short_first"
    default_partial = buckets.max_num_seqs if short_first else 2
    max_num_partial = config.max_num_partial_prefills or default_partial
    default_threshold = max(1, buckets.max_num_batched_tokens * 3 // 4)
    return ChunkSizes(
        buckets,
        short_first=short_first,
        max_num_partial_prefills=0 if whole_prompts else max_num_partial,
        long_prefill_token_threshold=config.long_prefill_token_threshold or default_threshold,
        target_itl_s=config.target_itl_s,
    )
