"""The scheduler: before each step it decides which tokens of which sequences are computed.

Called by the engine: `add`, then `schedule` -> (the executor runs the plan) -> `update`, `finish`
in a loop. Running sequences come first, one token or a chunk each, within the token budget; what is
left of the budget admits waiting ones, in the order of the policy. A prompt longer than the budget is
computed in chunks, and decode tokens of the others ride in the same steps.

            add, fork            admit                    hold
    (new) -----------> waiting --------> running ------------------> held
                          ^    preempt      |                          |
                          +-----------------+        resume            |
                          +--------------------------------------------+

Sequences own pages while they run, while they are held, and while they wait as a fork (*parked*).
When pages run out, cached ones go first, then those of held and parked sequences, the newest first,
and then the running sequence that stands last is preempted. The first always progresses.

Invariants (`check_invariants`):
    running sequences stand in the order in which they give way; waiting ones in the order of the
    policy; pages: free + cached + owned = all; every computed token of a sequence has a page.
"""

from collections.abc import Iterable
from itertools import chain

from jaxserve.pages.kv_manager import KVManager
from jaxserve.schedule.admission import Gate
from jaxserve.schedule.batch import SampledTokens
from jaxserve.schedule.buckets import Buckets
from jaxserve.schedule.chunking import ChunkSizes
from jaxserve.schedule.counters import SchedulerCounters
from jaxserve.schedule.invariants import check_scheduler
from jaxserve.schedule.plan import ScheduledSlice, StepPlan, StepResult
from jaxserve.schedule.preemption import MAX_PREEMPTIONS, PreemptionMode
from jaxserve.schedule.prefix_wait import PrefixWait
from jaxserve.schedule.queue import Policy, WaitingQueue
from jaxserve.schedule.sequence import Candidates, Namespace, Sequence, Status


class Scheduler:
    """Owns the queues and, through the KV manager, the pages.

    Args:
        kv: the page pool.
        buckets: the shapes a step may take; gives max_num_seqs and the token budget.
        gate: when waiting sequences may join at all.
        policy: which of them first.
        chunk_sizes: how the budget is shared out.
        preemption: recompute or swap.
    """

    def __init__(
        self,
        *,
        kv: KVManager,
        buckets: Buckets,
        gate: Gate,
        policy: Policy,
        chunk_sizes: ChunkSizes,
        preemption: PreemptionMode,
    ):
        self.kv = kv
        self.buckets = buckets
        self.gate = gate
        self.policy = policy
        self.chunk_sizes = chunk_sizes
        self.preemption = preemption
        self.counters = SchedulerCounters()
        self.waiting = WaitingQueue(policy)
        self.running: list[Sequence] = []
        self.held: list[Sequence] = []
        self.parked: list[Sequence] = []  # held, or waiting with pages
        self.prefix_wait = PrefixWait(kv.page_size, self.counters)
        self._weights_version = 0

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # Into the queues and out of them

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence that owns nothing. Alone, it fits an empty pool."""
        self._wait(seq)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Queues a new sequence that begins with the first `num_tokens` tokens of another one and
        shares the pages that hold them.

        Args:
            parent: in any state; where it has no pages, the child has none either.
            child: its token_ids begin with these tokens. Should it have no more than these, the last
                one is computed again, into a copy of its page: somebody has to compute logits.
            num_tokens: cut to what the parent has computed.
        """
        shared = min(num_tokens, parent.num_computed_tokens, len(child.token_ids) - 1)
        if shared > 0 and len(parent.page_table):
            child.page_table = self.kv.fork(parent.page_table, shared)
            child.num_computed_tokens = child.num_cached_tokens = shared
            self.parked.append(child)
        self.counters.num_forks += 1
        self._wait(child)

    def hold(self, seq: Sequence) -> None:
        """Stops a running sequence; it keeps its pages as long as nobody needs them."""
        self.running.remove(seq)
        seq.status = Status.HELD
        self.held.append(seq)
        self.parked.append(seq)

    def resume(self, seq: Sequence) -> None:
        """Lets a held sequence go on."""
        self.held.remove(seq)
        seq.status = Status.PREEMPTED
        self._wait(seq)

    def finish(self, seq: Sequence) -> None:
        """Ends a sequence in any state; its pages are free or cached at once."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        elif seq.status is Status.HELD:
            self.held.remove(seq)
        else:
            self.waiting.remove(seq)
        self._give_up_pages(seq)
        seq.status = Status.FINISHED

    def _wait(self, seq: Sequence) -> None:
        self.waiting.push(seq)

    def _give_up_pages(self, seq: Sequence) -> None:
        """Device and host pages, whatever it has; what is lost is computed again."""
        if seq in self.parked:
            self.parked.remove(seq)
        self.kv.free(seq.page_table)
        seq.num_computed_tokens = 0
        if seq.host_pages is not None:
            self.kv.drop_host_pages(seq.host_pages)
            seq.host_pages = None

    def namespace(self, seq: Sequence) -> Namespace:
        """Whose cached pages a sequence may use."""
        return Namespace(self._weights_version, seq.request.cache_salt, None)

    # One step

    def schedule(self) -> StepPlan | None:
        """The next step, with the pages for it taken; None when nothing can run."""
        slices: list[ScheduledSlice] = []
        num_preemptions = self.counters.num_preemptions
        budget = self._continue_running(slices)
        if self.counters.num_preemptions == num_preemptions:
            budget = self._admit_waiting(slices, budget)  # not with pages that were just given up
        if not slices:
            return None
        self._use_leftover(slices, budget)
        slices.sort(key=lambda one: (one.num_tokens, one.start + one.num_tokens))
        num_tokens = sum(one.num_tokens for one in slices)
        num_rows = sum(one.num_samples for one in slices)
        bucket = self.buckets.pick(num_tokens, max(1, num_rows))
        moves = self.kv.take_moves()
        self.counters.num_copied_pages += len(moves.copies)
        return StepPlan(
            slices=tuple(slices), bucket=bucket, num_tokens=num_tokens, **moves._asdict()
        )

    def _continue_running(self, slices: list[ScheduledSlice]) -> int:
        """Gives the running sequences their tokens, preempting from the end as needed; returns what
        is left of the budget.
        """
        shares, budget = self.chunk_sizes.share(self.running, self.waiting)
        index = 0
        while index < len(self.running):
            seq = self.running[index]
            num_tokens = shares[index]
            if not self._make_room(seq, seq.num_computed_tokens + num_tokens):
                break  # seq stood last and gave way itself
            slices.append(_slice(seq, num_tokens))
            index += 1
        return budget

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Grows a running sequence's pages; False if it had to give way itself."""
        while not self.kv.grow(seq.page_table, num_tokens, seq.num_computed_tokens):
            if self._give_up_parked():
                continue
            victim = self.running[-1]
            if victim is seq and len(self.running) == 1:
                raise RuntimeError(
                    f"request {seq.request.id!r} alone outgrew the page pool: {num_tokens} tokens, "
                    f"{self.kv.num_slots} slots; admission should have refused it"
                )
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _give_up_parked(self, in_favour_of: Sequence | None = None) -> bool:
        """Takes the pages of the newest held or parked sequence; False when there is none.

        A newcomer gets those of newer ones and of finished ones that are held, and any when nothing
        else runs.
        """
        parked = self.parked
        if in_favour_of is not None:
            parked = [seq for seq in parked if seq is not in_favour_of]
            if self.running:
                order = in_favour_of.order
                parked = [seq for seq in parked if seq.order > order or seq.request.hold]
        if not parked:
            return False
        self._give_up_pages(max(parked, key=lambda seq: seq.order))
        self.counters.num_parked_given_up += 1
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        num_tokens = victim.num_computed_tokens
        if self.preemption.prefers_swap(num_tokens, len(victim.page_table)):
            victim.host_pages = self.kv.swap_out(victim.page_table, num_tokens)
            if victim.host_pages is None:
                self.counters.num_swaps_refused += 1
        if victim.host_pages is None:
            self.kv.free(victim.page_table)
            self.counters.num_recomputes += 1
        else:
            self.counters.num_swaps += 1
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.status = Status.PREEMPTED
        self.counters.num_preemptions += 1
        self._wait(victim)

    def _admit_waiting(self, slices: list[ScheduledSlice], budget: int) -> int:
        num_partial = sum(not one.num_samples for one in slices)
        skipped: set[Sequence] = set()
        while self.waiting and budget > 0 and len(self.running) < self.buckets.max_num_seqs:
            if not self.gate.may_admit(len(self.running)):
                break
            candidates = self.waiting.candidates(self._num_cached)
            seq = next((one for one in candidates if one not in skipped), None)
            if seq is None:
                break
            if self.prefix_wait.must_wait(seq, self.running, self._num_cached):
                if self.policy.in_order:
                    break
                skipped.add(seq)
                continue
            num_tokens = self._try_admit(seq, budget, num_partial)
            if num_tokens == 0 and not self.running:
                # Alone it fits, but perhaps not beside pages that it shares and has to copy.
                self._give_up_pages(seq)
                num_tokens = self._try_admit(seq, budget, num_partial, copy_last_page=False)
            if num_tokens == 0:
                break
            slices.append(_slice(seq, num_tokens))
            num_partial += not slices[-1].num_samples
            budget -= num_tokens
        return budget

    def _num_cached(self, seq: Sequence) -> int:
        if len(seq.page_table):
            return seq.num_computed_tokens
        return self.kv.peek(self.namespace(seq), seq.token_ids)

    def _try_admit(
        self, seq: Sequence, budget: int, num_partial: int, copy_last_page: bool = True
    ) -> int:
        """Lets a waiting sequence run; returns its tokens in this step, 0 if it has to wait on."""
        parked = len(seq.page_table) > 0
        if not parked:
            match = self.kv.match(self.namespace(seq), seq.token_ids, copy_last_page)
            self.kv.adopt(seq.page_table, match)
            seq.num_computed_tokens = match.num_tokens
        num_matched_pages = len(seq.page_table)
        swapped = seq.host_pages
        if swapped is not None and not parked:
            seq.num_computed_tokens = max(seq.num_computed_tokens, swapped.num_tokens)
        num_tokens = min(seq.num_tokens_to_compute, budget)
        is_partial = num_tokens < seq.num_tokens_to_compute
        if (is_partial and num_partial >= self.chunk_sizes.max_num_partial_prefills) or not (
            self._has_room_for(seq)
        ):
            if not parked:
                self.kv.free(seq.page_table)
                seq.num_computed_tokens = 0
            return 0
        begin = seq.num_computed_tokens
        if not self.kv.grow(seq.page_table, begin + num_tokens, begin):
            raise RuntimeError("pages seen available a moment ago are gone")
        if swapped is not None:
            self.kv.swap_in(seq.page_table, min(num_matched_pages, len(swapped.page_ids)), swapped)
            seq.host_pages = None
        self._start(seq, parked)
        return num_tokens

    def _start(self, seq: Sequence, parked: bool) -> None:
        if parked:
            self.parked.remove(seq)
        elif seq.status is Status.WAITING:
            # A resumed sequence goes on reporting what its first admission found.
            seq.num_cached_tokens = seq.num_computed_tokens
            self.counters.num_queried_tokens += len(seq.token_ids)
            self.counters.num_hit_tokens += seq.num_computed_tokens
        self.waiting.admit(seq)
        self.gate.admitted()
        seq.status = Status.RUNNING
        position = len(self.running)
        standing = self.policy.standing(seq)
        while position and self.policy.standing(self.running[position - 1]) > standing:
            position -= 1
        self.running.insert(position, seq)

    def _has_room_for(self, seq: Sequence) -> bool:
        """All its known tokens must fit beside one more page for each running sequence: a newcomer
        that would be preempted at the next page border only wastes its own computation.

        One that was preempted often is admitted for good: beside all that those who stand before it
        may ever need.
        """
        begin = seq.num_computed_tokens
        needed = self.kv.num_needed(seq.page_table, len(seq.token_ids), begin) + len(self.running)
        if seq.num_preemptions >= MAX_PREEMPTIONS - 1:
            standing = self.policy.standing(seq)
            before = [s for s in self.running if self.policy.standing(s) < standing]
            for_good = self.kv.num_needed(seq.page_table, seq.max_num_tokens, begin) + sum(
                s.page_table.num_missing(s.max_num_tokens) for s in before
            )
            needed = max(needed, for_good)
        while needed > self.kv.num_available_pages:
            if not self._give_up_parked(in_favour_of=seq):
                return False
        return True

    def _use_leftover(self, slices: list[ScheduledSlice], budget: int) -> None:
        """Tokens that nobody else took make chunks longer, as far as pages allow."""
        for index, one in enumerate(slices):
            rest = one.seq.num_tokens_to_compute - one.num_tokens
            extra = min(rest, budget)
            if extra > 0 and self.kv.grow(
                one.seq.page_table, one.start + one.num_tokens + extra, one.start
            ):
                slices[index] = _slice(one.seq, one.num_tokens + extra)
                budget -= extra

    def update(self, plan: StepPlan, sampled: SampledTokens) -> StepResult:
        """Takes in a step's result: progress, pages for others to find, and the sampled tokens.

        Returns:
            Which sequences got a token (the engine decides whether each of them ends) and which
            failed (the engine ends them).
        """
        result = StepResult([], [])
        row = 0
        for index, one in enumerate(plan.slices):
            seq, first_row = one.seq, row
            row += one.num_samples
            seq.num_iterations += 1
            if not sampled.finite[index]:
                result.failed.append(seq)
                continue
            seq.num_computed_tokens += one.num_tokens
            self.kv.record(
                seq.page_table, seq.token_ids, seq.num_computed_tokens, seq.request.priority
            )
            if one.num_samples:
                _take_row(seq, sampled, first_row)
                result.advanced.append(seq)
        self.counters.observe(plan)
        return result

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """Learns from how long a step took."""
        self.chunk_sizes.observe(plan, seconds)

    # Starting over

    def change_weights(self) -> None:
        """Makes sure that nothing computed by the weights so far is used again: all pages are given
        up, and every sequence computes its tokens again.
        """
        for seq in reversed(list(self.running)):
            self.running.remove(seq)
            self._give_up_pages(seq)
            seq.status = Status.PREEMPTED
            self._wait(seq)
        for seq in chain(self.waiting, self.held):
            self._give_up_pages(seq)
        self.kv.clear_cache()
        self._weights_version += 1

    def restart(self, seqs: Iterable[Sequence]) -> None:
        """Starts over from these sequences: empty pages, all of them waiting but those held.

        For after a step that was cut short, when queues and pages may be in any state.
        """
        self.kv.reset()
        self.running, self.held, self.parked = [], [], []
        self.waiting = WaitingQueue(self.policy)
        for seq in seqs:
            seq.page_table = self.kv.new_table()
            seq.num_computed_tokens = 0
            seq.host_pages = None
            if seq.status is Status.HELD:
                self.held.append(seq)
                continue
            if seq.status is not Status.WAITING:
                seq.status = Status.PREEMPTED
            self._wait(seq)

    def check_invariants(self) -> None:
        """Raises AssertionError when a queue or the pages are not as the module says."""
        check_scheduler(self)


def _slice(seq: Sequence, num_tokens: int) -> ScheduledSlice:
    reaches_end = num_tokens == seq.num_tokens_to_compute
    return ScheduledSlice(seq, seq.num_computed_tokens, num_tokens, int(reaches_end))


def _take_row(seq: Sequence, sampled: SampledTokens, row: int) -> None:
    if seq.wants_candidates:
        assert sampled.candidate_ids is not None
        assert sampled.candidate_logprobs is not None
        seq.candidates = Candidates(sampled.candidate_ids[row], sampled.candidate_logprobs[row])
        return
    for m in range(sampled.num_tokens[row]):
        seq.append(int(sampled.token_ids[row, m]), float(sampled.logprobs[row, m]))
