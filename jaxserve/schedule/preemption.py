"""What happens to a running sequence whose pages are needed by an older one.

Source: vLLM (Kwon et al., SOSP 2023), section 4.5: all-or-nothing eviction, recovery by
recomputation.
"""

from jaxserve.pages.kv_manager import KVManager
from jaxserve.schedule.sequence import Sequence, Status


def newest(running: list[Sequence]) -> Sequence:
    """The victim: running sequences stand in arrival order, so the oldest always progresses."""
    return running[-1]


def preempt_by_recompute(seq: Sequence, kv: KVManager) -> None:
    """Gives up the pages; prompt and produced tokens are computed again when the sequence is
    admitted again.

    Nothing is sampled twice: a slice samples only when it reaches the last known token, and draws
    depend on the seed and the output position alone.
    """
    kv.free(seq.page_table)
    seq.num_computed_tokens = 0
    seq.num_preemptions += 1
    seq.status = Status.PREEMPTED
