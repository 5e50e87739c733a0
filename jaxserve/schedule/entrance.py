"""How one waiting sequence gets the pages to run with: what the cache has, what was swapped out, and
room for the rest. Used by the scheduler, which decides who comes next.

Invariant: a sequence that is turned away owns what it owned before.
"""

from collections.abc import Callable
from collections.abc import Sequence as Several

from jaxserve.pages.kv_manager import KVManager
from jaxserve.schedule.chunking import ChunkSizes
from jaxserve.schedule.parked import Parked
from jaxserve.schedule.preemption import MAX_PREEMPTIONS
from jaxserve.schedule.queue import Policy
from jaxserve.schedule.sequence import Namespace, Sequence


class Entrance:
    """Admits one sequence at a time, or turns it away.

    Args:
        kv: the pages.
        parked: whose pages a newcomer may take.
        policy: who stands before whom.
        chunk_sizes: say how many prompts may be in the middle of their chunks at once.
        namespace: whose cached pages a sequence may use.
    """

    def __init__(
        self,
        *,
        kv: KVManager,
        parked: Parked,
        policy: Policy,
        chunk_sizes: ChunkSizes,
        namespace: Callable[[Sequence], Namespace],
    ):
        self._kv = kv
        self._parked = parked
        self._policy = policy
        self._chunk_sizes = chunk_sizes
        self._namespace = namespace

    def num_cached(self, seq: Sequence) -> int:
        """Tokens that a waiting sequence would not have to compute again."""
        if len(seq.page_table):
            return seq.num_computed_tokens
        num_swapped = 0 if seq.host_pages is None else seq.host_pages.num_tokens
        return max(num_swapped, self._kv.peek(self._namespace(seq), seq.matchable_token_ids))

    def admit(
        self, seq: Sequence, budget: int, running: Several[Sequence], partial: Several[Sequence]
    ) -> int:
        """Gives a waiting sequence pages for its next tokens.

        Args:
            seq: in no queue but the waiting one.
            budget: most tokens it may compute in this step, at least 1.
            running: everyone who runs already; their pages for this step are taken.
            partial: those of them that will still be in the middle of their prompts.

        Returns:
            Its tokens in this step; 0 if it has to wait on.
        """
        num_tokens = self._try_admit(seq, budget, running, partial)
        if num_tokens == 0 and not running:
            # Alone it fits, but perhaps not beside pages that it shares and has to copy.
            self._parked.give_up_pages(seq)
            num_tokens = self._try_admit(seq, budget, running, partial, copy_last_page=False)
        return num_tokens

    def _try_admit(
        self,
        seq: Sequence,
        budget: int,
        running: Several[Sequence],
        partial: Several[Sequence],
        copy_last_page: bool = True,
    ) -> int:
        has_pages = len(seq.page_table) > 0
        if not has_pages:
            match = self._kv.match(self._namespace(seq), seq.matchable_token_ids, copy_last_page)
            self._kv.adopt(seq.page_table, match)
            seq.num_computed_tokens = match.num_tokens
        num_matched_pages = len(seq.page_table)
        swapped = seq.host_pages
        if swapped is not None:
            seq.num_computed_tokens = max(seq.num_computed_tokens, swapped.num_tokens)
        num_tokens = min(seq.num_tokens_to_compute, budget)
        is_partial = num_tokens < seq.num_tokens_to_compute
        most = self._chunk_sizes.max_num_partial_prefills
        if (is_partial and len(partial) >= most) or not self._make_room(seq, running, partial):
            if not has_pages:
                self._kv.free(seq.page_table)
                seq.num_computed_tokens = 0
            return 0
        if not has_pages:
            self._kv.count_hit(seq.page_table)
        begin = seq.num_computed_tokens
        if not self._kv.grow(seq.page_table, begin + num_tokens, begin):
            raise RuntimeError("pages seen available a moment ago are gone")
        if swapped is not None:
            first_page = min(num_matched_pages, len(swapped.page_ids))
            self._kv.swap_in(seq.page_table, first_page, swapped)
            seq.host_pages = None
        return num_tokens

    def _make_room(
        self, seq: Sequence, running: Several[Sequence], partial: Several[Sequence]
    ) -> bool:
        """Whether enough pages are available, after taking those of parked sequences as needed; none
        are taken if all of them would not do.
        """
        kv, nobody_runs = self._kv, not running
        missing = self._num_needed(seq, running, partial) - kv.num_available_pages
        if missing <= 0:
            return True
        # One more: a page that it shares with one of them need not be copied any more.
        if missing > self._parked.most_pages_for(seq, nobody_runs) + 1:
            return False
        while self._num_needed(seq, running, partial) > kv.num_available_pages:
            if not self._parked.give_up_for(seq, nobody_runs):
                return False
        return True

    def _num_needed(
        self, seq: Sequence, running: Several[Sequence], partial: Several[Sequence]
    ) -> int:
        """Its known tokens must fit beside those of the running ones and one more page for each of
        them: a newcomer that would be preempted at the next page border only wastes its own
        computation. That page also makes up for what a running one's copy still reads, which counts
        as available and cannot be lent in this step.
        """
        known = self._kv.num_needed(seq.page_table, len(seq.token_ids), seq.num_computed_tokens)
        promised = sum(one.page_table.num_missing(len(one.token_ids)) for one in partial)
        return max(known + promised + len(running), self._num_needed_for_good(seq, running))

    def _num_needed_for_good(self, seq: Sequence, running: Several[Sequence]) -> int:
        """One that was preempted often is admitted for good: beside all that those who stand before
        it may ever need. Whoever is admitted before it later must leave it that.
        """
        standing = self._policy.standing
        settled = [s for s in (seq, *running) if s.num_preemptions >= MAX_PREEMPTIONS]
        if not settled:
            return 0
        last = max(standing(one) for one in settled)
        if standing(seq) > last:
            return 0
        begin = seq.num_computed_tokens
        return self._kv.num_needed(seq.page_table, seq.max_num_tokens, begin) + sum(
            one.page_table.num_missing(one.max_num_tokens)
            for one in running
            if standing(one) <= last
        )
