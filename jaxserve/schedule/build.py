"""Makes a scheduler with its KV manager from a config: used by `jaxserve.build` and by tests and
simulators.
"""

from jaxserve.config import SchedulerConfig
from jaxserve.pages.kv_manager import KVManager
from jaxserve.schedule.admission import ADMISSIONS
from jaxserve.schedule.buckets import Buckets
from jaxserve.schedule.scheduler import Scheduler


def build_scheduler(
    config: SchedulerConfig, *, num_pages: int, page_size: int, max_model_len: int
) -> Scheduler:
    """A scheduler over an empty pool.

    Args:
        config: limits of a step.
        num_pages: pages in the pool, the null page included.
        page_size: tokens a page.
        max_model_len: most tokens of a sequence.
    """
    return Scheduler(
        kv=KVManager(num_pages=num_pages, page_size=page_size, max_model_len=max_model_len),
        buckets=Buckets.make(
            max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        ),
        admission=ADMISSIONS[config.scheduling](),
    )
