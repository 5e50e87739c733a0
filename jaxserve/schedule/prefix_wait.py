"""Whether it pays to wait: a request whose next page a running one is computing finds it in the tree
a step later. So sixteen requests with one prefix compute it once.

Used by the scheduler. The waiting is bounded and counted.
"""

from collections.abc import Iterable

from jaxserve.schedule.counters import SchedulerCounters
from jaxserve.schedule.queue import NumCached
from jaxserve.schedule.sequence import Sequence

MAX_STEPS = 64  # that one sequence waits in all


class PrefixWait:
    """Lets sequences wait for pages that are on their way.

    Args:
        page_size: tokens a page.
        counters: where the waiting is counted.
    """

    def __init__(self, page_size: int, counters: SchedulerCounters):
        self._page_size = page_size
        self._counters = counters

    def must_wait(self, seq: Sequence, running: Iterable[Sequence], num_cached: NumCached) -> bool:
        """Whether `seq` should not be admitted yet, since one of the `running` is about to compute
        the next page that it needs; each of them computes at least one token in every step.
        """
        if len(seq.page_table) or seq.host_pages is not None:
            return False  # it has more than the tree
        if seq.num_steps_waited_for_prefix >= MAX_STEPS:
            return False
        if not self._is_on_its_way(seq, running, num_cached):
            return False
        self._counters.num_prefix_waits += seq.num_steps_waited_for_prefix == 0
        self._counters.num_prefix_wait_steps += 1
        seq.num_steps_waited_for_prefix += 1
        return True

    def _is_on_its_way(
        self, seq: Sequence, running: Iterable[Sequence], num_cached: NumCached
    ) -> bool:
        """Whether a running one has the page that follows the cached prefix of `seq` among its known
        tokens and has not computed it yet.
        """
        salt, size, most = seq.request.cache_salt, self._page_size, seq.num_matchable
        end = -1
        for other in running:
            first_missing = other.num_computed_tokens - other.num_computed_tokens % size
            if first_missing + size > min(len(other.token_ids), most):
                continue  # it fills no page that seq could use; true of most that decode
            if other.request.cache_salt != salt or other.token_ids[:1] != seq.token_ids[:1]:
                continue
            if end < 0:
                cached = num_cached(seq)
                end = cached + size
                if cached % size or end > most:
                    return False  # all that may serve it is cached, or has no full page left
            if (
                other.num_computed_tokens < end <= len(other.token_ids)
                and other.token_ids[:end] == seq.token_ids[:end]
            ):
                return True
        return False
