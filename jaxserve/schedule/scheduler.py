"""The scheduler: before each step it decides which tokens of which sequences are computed.

Called by the engine: `add`, then `schedule` -> (the executor runs the plan) -> `update`, `finish`
in a loop. Running sequences come first, one token or a chunk each, within the token budget; what is
left of the budget admits waiting ones, first come first served. A prompt longer than the budget is
computed in chunks, and decode tokens of the others ride in the same steps (Source: SARATHI, Agrawal
et al. 2023, stall-free batching).

Invariants (`check_invariants`):
    running and waiting stand in arrival order; only the last running sequence can be in the middle
    of a chunked prompt; pages: free + owned = all; waiting sequences own none.
"""

from collections import deque
from collections.abc import Iterable

from jaxserve.pages.kv_manager import KVManager
from jaxserve.schedule.admission import Admission
from jaxserve.schedule.batch import SampledTokens
from jaxserve.schedule.buckets import Buckets
from jaxserve.schedule.plan import ScheduledSlice, StepPlan
from jaxserve.schedule.preemption import newest, preempt_by_recompute
from jaxserve.schedule.sequence import Sequence, Status


class Scheduler:
    """Owns the queues and, through the KV manager, the pages.

    Args:
        kv: the page pool.
        buckets: the shapes a step may take; gives max_num_seqs and the token budget.
        admission: when waiting sequences may join.
    """

    def __init__(self, *, kv: KVManager, buckets: Buckets, admission: Admission):
        self.kv = kv
        self.buckets = buckets
        self.admission = admission
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queues a sequence.

        Its arrival number is larger than any before, and it fits an empty pool.
        """
        self.waiting.append(seq)

    def schedule(self) -> StepPlan | None:
        """The next step, with the pages for it taken; None when nothing can run."""
        slices: list[ScheduledSlice] = []
        budget = self.buckets.max_num_batched_tokens
        num_preemptions = self.num_preemptions
        budget = self._continue_running(slices, budget)
        if (
            self.num_preemptions == num_preemptions
        ):  # pages that were just given up are not handed to newcomers
            self._admit_waiting(slices, budget)
        if not slices:
            return None
        slices.sort(key=lambda s: (s.num_tokens, s.start + s.num_tokens))
        num_tokens = sum(s.num_tokens for s in slices)
        num_rows = sum(s.num_samples for s in slices)
        bucket = self.buckets.pick(num_tokens, max(1, num_rows))
        return StepPlan(slices=tuple(slices), bucket=bucket)

    def _continue_running(self, slices: list[ScheduledSlice], budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            seq = self.running[index]
            num_tokens = min(seq.num_tokens_to_compute, budget)
            if not self._make_room(seq, seq.num_computed_tokens + num_tokens):
                break  # seq was the newest and gave way itself: nobody stands behind it
            slices.append(_slice(seq, num_tokens))
            budget -= num_tokens
            index += 1
        return budget

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Grows the sequence's pages, preempting the newest as needed; False if that was `seq`
        itself.
        """
        while not self.kv.grow(seq.page_table, num_tokens):
            victim = newest(self.running)
            if victim is seq and len(self.running) == 1:
                raise RuntimeError(
                    f"request {seq.request.id!r} alone outgrew the page pool: {num_tokens} tokens, "
                    f"{self.kv.num_slots} slots; admission should have refused it"
                )
            self.running.pop()
            preempt_by_recompute(victim, self.kv)
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
            if victim is seq:
                return False
        return True

    def _admit_waiting(self, slices: list[ScheduledSlice], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.buckets.max_num_seqs:
            if not self.admission.may_admit(len(self.running)):
                return
            seq = self.waiting[0]
            # All its known tokens must fit beside one more page for each running sequence: a newcomer that
            # would be preempted at the next page border only wastes its own computation.
            num_needed = seq.page_table.num_missing(len(seq.token_ids)) + len(self.running)
            if num_needed > self.kv.pool.num_free:
                return
            match = self.kv.match(seq.token_ids)
            self.kv.adopt(seq.page_table, match)
            seq.num_computed_tokens = match.num_tokens
            if (
                seq.status is Status.WAITING
            ):  # a resumed sequence reports what its first admission found
                seq.num_cached_tokens = match.num_tokens
            num_tokens = min(seq.num_tokens_to_compute, budget)
            if not self.kv.grow(seq.page_table, seq.num_computed_tokens + num_tokens):
                raise RuntimeError("pages seen free a moment ago are gone")
            self.waiting.popleft()
            self.running.append(seq)
            self.admission.admitted()
            seq.status = Status.RUNNING
            slices.append(_slice(seq, num_tokens))
            budget -= num_tokens

    def update(self, plan: StepPlan, sampled: SampledTokens) -> list[Sequence]:
        """Takes in a step's result: progress, and the sampled tokens.

        Returns:
            The sequences that got a token, in plan order; the engine decides whether each of them
            ends.
        """
        advanced = []
        row = 0
        for one in plan.slices:
            one.seq.num_computed_tokens += one.num_tokens
            if one.num_samples:
                for m in range(sampled.num_tokens[row]):
                    one.seq.append(int(sampled.token_ids[row, m]), float(sampled.logprobs[row, m]))
                advanced.append(one.seq)
                row += 1
        return advanced

    def finish(self, seq: Sequence) -> None:
        """Ends a waiting or running sequence and returns its pages at once."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self.kv.free(seq.page_table)
        elif seq.status is not Status.FINISHED:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED

    def restart(self, seqs: Iterable[Sequence]) -> None:
        """Starts over from these sequences, oldest first: empty pages, all of them waiting.

        For after a step that was cut short, when queues and pages may be in any state.
        """
        self.kv.reset()
        self.running = []
        self.waiting = deque(sorted(seqs, key=lambda seq: seq.arrival))
        for seq in self.waiting:
            seq.page_table = self.kv.new_table()
            seq.num_computed_tokens = 0
            if seq.status is not Status.WAITING:
                seq.status = Status.PREEMPTED

    def check_invariants(self) -> None:
        """Raises AssertionError when a queue or the pages are not as the module says."""
        for queue in (self.running, self.waiting):
            arrivals = [seq.arrival for seq in queue]
            assert arrivals == sorted(set(arrivals)), f"not in arrival order: {arrivals}"
        assert len(self.running) <= self.buckets.max_num_seqs
        for seq in self.running:
            assert seq.status is Status.RUNNING
            assert seq.num_computed_tokens <= seq.page_table.num_slots, (
                "computed tokens without a page"
            )
            assert seq.num_tokens_to_compute >= 1
            assert seq.num_tokens_to_compute == 1 or seq is self.running[-1], (
                "a chunk before the last"
            )
        for seq in self.waiting:
            assert seq.status in (Status.WAITING, Status.PREEMPTED)
            assert len(seq.page_table) == 0, "a waiting sequence owns pages"
            assert seq.num_computed_tokens == 0
        self.kv.check_invariants([seq.page_table for seq in self.running])


def _slice(seq: Sequence, num_tokens: int) -> ScheduledSlice:
    reaches_end = num_tokens == seq.num_tokens_to_compute
    return ScheduledSlice(
        seq=seq, start=seq.num_computed_tokens, num_tokens=num_tokens, num_samples=int(reaches_end)
    )
