"""Pages of sequences that do not run: forks that wait for a slot, and held sequences. Used by the
scheduler, which gives them up, the newest first, before anyone running is preempted.

Invariant: every waiting or held sequence that owns device pages is parked.
"""

from collections.abc import Collection, Iterator

from jaxserve.pages.kv_manager import KVManager
from jaxserve.schedule.counters import SchedulerCounters
from jaxserve.schedule.sequence import Sequence, Status


class Parked:
    """The sequences whose pages may be taken.

    Args:
        kv: owner of the pages.
        counters: where it is counted.
    """

    def __init__(self, kv: KVManager, counters: SchedulerCounters):
        self._kv = kv
        self._counters = counters
        self._seqs: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._seqs

    def add(self, seq: Sequence) -> None:
        self._seqs.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Leaves a sequence its pages: it runs now."""
        self._seqs.remove(seq)

    def clear(self) -> None:
        """Forgets everyone, for after all pages were reset."""
        self._seqs.clear()

    def give_up_pages(self, seq: Sequence) -> None:
        """Device and host pages of any sequence, whatever it has; what is lost is computed again."""
        self._seqs.discard(seq)
        self._kv.free(seq.page_table)
        seq.num_computed_tokens = 0
        if seq.host_pages is not None:
            self._kv.drop_host_pages(seq.host_pages)
            seq.host_pages = None

    def give_up_newest(self) -> bool:
        """Takes the pages of the newest; False when there is none."""
        return self._give_up_newest_of(self._seqs)

    def give_up_for(self, newcomer: Sequence, nobody_runs: bool) -> bool:
        """The same in favour of a sequence that waits. It gets the pages of newer ones and of ended
        ones that are held, and any when nothing else runs.
        """
        return self._give_up_newest_of(self._for(newcomer, nobody_runs))

    def most_pages_for(self, newcomer: Sequence, nobody_runs: bool) -> int:
        """So many pages, or fewer where they are shared, come of calling `give_up_for` to the end."""
        return sum(len(seq.page_table) for seq in self._for(newcomer, nobody_runs))

    def _for(self, newcomer: Sequence, nobody_runs: bool) -> list[Sequence]:
        return [
            seq
            for seq in self._seqs
            if seq is not newcomer
            and (nobody_runs or seq.order > newcomer.order or _has_ended(seq))
        ]

    def _give_up_newest_of(self, seqs: Collection[Sequence]) -> bool:
        if not seqs:
            return False
        self.give_up_pages(max(seqs, key=lambda seq: seq.order))
        self._counters.num_parked_given_up += 1
        return True


def _has_ended(seq: Sequence) -> bool:
    """Whether it is only kept to be forked; a held beam, say, will go on."""
    return seq.status is Status.HELD and seq.request.hold
