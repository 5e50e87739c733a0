"""The scheduler: before each step it decides which tokens of which sequences are computed.

Called by the engine: `add`, then `schedule` -> (the executor runs the plan) -> `update`, `finish`
in a loop; one further step may be scheduled before `update` has the result of the last. Running
sequences come first, one token or a chunk each, within the token budget; what is left of the budget
admits waiting ones, in the order of the policy. A prompt longer than the budget is computed in
chunks, and decode tokens of the others ride in the same steps.

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

from functools import cache
from operator import attrgetter

from jaxserve.pages.kv_manager import KVManager
from jaxserve.request import Request
from jaxserve.schedule.admission import Gate
from jaxserve.schedule.batch import SampledTokens
from jaxserve.schedule.buckets import Buckets
from jaxserve.schedule.chunking import ChunkSizes
from jaxserve.schedule.counters import SchedulerCounters
from jaxserve.schedule.entrance import Entrance
from jaxserve.schedule.in_flight import begin, count_decode_steps, take_in
from jaxserve.schedule.invariants import check_queues
from jaxserve.schedule.parked import Parked
from jaxserve.schedule.plan import ScheduledSlice, StepPlan, StepResult, scored_ranges
from jaxserve.schedule.preemption import PreemptionMode
from jaxserve.schedule.prefix_wait import PrefixWait
from jaxserve.schedule.queue import NumCached, Policy, WaitingQueue
from jaxserve.schedule.sequence import Namespace, Sequence, Status

_START, _NUM_TOKENS = attrgetter("start"), attrgetter("num_tokens")  # of a ScheduledSlice
MAX_PASSED = 64  # of those that wait for a prefix, before a step looks no further


class Scheduler:
    """Owns the queues and, through the KV manager, the pages.

    Args:
        kv: the page pool.
        buckets: the shapes a step may take; gives max_num_seqs and the token budget.
        gate: when waiting sequences may join at all.
        policy: which of them first.
        chunk_sizes: how the budget is shared out.
        preemption: recompute or swap.
        num_decode_steps: most tokens of each sequence that one step computes one after the other,
            when all decode and nobody waits.
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
        num_decode_steps: int = 1,
    ):
        self.kv = kv
        self.buckets = buckets
        self.gate = gate
        self.policy = policy
        self.chunk_sizes = chunk_sizes
        self.preemption = preemption
        self.num_decode_steps = num_decode_steps
        self.counters = SchedulerCounters()
        self.waiting = WaitingQueue(policy)
        self.running: list[Sequence] = []
        self.held: list[Sequence] = []
        self.admitted: list[Sequence] = []  # by the last `schedule`
        self.parked = Parked(kv, self.counters)
        self.prefix_wait = PrefixWait(kv.page_size, self.counters)
        self.entrance = Entrance(
            kv=kv,
            parked=self.parked,
            policy=policy,
            chunk_sizes=chunk_sizes,
            namespace=self.namespace,
        )
        self.weights_version = 0  # counts changes of the weights; see `Namespace`
        self.barrier: int | None = None  # newer requests than this arrival wait; None = none do

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # Into the queues and out of them

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence that owns nothing. Alone, it fits an empty pool."""
        seq.begin_version(self.weights_version)
        self.waiting.push(seq)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Queues a new sequence that begins with the first `num_tokens` tokens of another one and
        shares the pages that hold them.

        Args:
            parent: in any state, but with no step under way, unless it ends now; where it has no
                pages, the child has none either.
            child: its token_ids begin with these tokens. Should it have no more than these, the last
                one is computed again, into a copy of its page: somebody has to compute logits.
            num_tokens: cut to what the parent has computed.
        """
        shared = min(num_tokens, parent.num_computed_tokens, child.num_matchable - 1)
        if shared > 0 and len(parent.page_table):
            child.page_table = self.kv.fork(parent.page_table, shared)
            child.num_computed_tokens = child.num_cached_tokens = shared
            self.parked.add(child)
        self.counters.num_forks += 1
        child.begin_version(self.weights_version)
        self.waiting.push(child)

    def hold(self, seq: Sequence) -> None:
        """Stops a sequence that runs; it keeps its pages as long as nobody needs them. It may have given
        way since its step was sent: then it has none.
        """
        seq.forget_step()
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self.parked.add(seq)
        else:
            self.waiting.remove(seq)
            self.parked.give_up_pages(seq)
        seq.status = Status.HELD
        self.held.append(seq)

    def resume(self, seq: Sequence) -> None:
        """Lets a held sequence go on."""
        self.held.remove(seq)
        seq.status = Status.PREEMPTED
        self.waiting.push(seq)

    def finish(self, seq: Sequence) -> None:
        """Ends a sequence in any state; its pages are free or cached at once."""
        if seq.status is Status.FINISHED:
            return
        seq.forget_step()
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        elif seq.status is Status.HELD:
            self.held.remove(seq)
        else:
            self.waiting.remove(seq)
        self.parked.give_up_pages(seq)
        seq.status = Status.FINISHED

    def namespace(self, seq: Sequence) -> Namespace:
        """Whose cached pages a sequence may use."""
        return self._namespace_of(seq.request)

    def _namespace_of(self, request: Request) -> Namespace:
        return Namespace(self.weights_version, request.cache_salt, None)

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a new request's prompt that the prefix cache has."""
        return self.kv.peek(self._namespace_of(request), request.prompt_token_ids)

    # One step

    def schedule(self) -> StepPlan | None:
        """The next step, with the pages for it taken and its tokens in flight; None when nothing
        can run.
        """
        slices: list[ScheduledSlice] = []
        self.admitted = []
        num_preemptions = self.counters.num_preemptions
        budget = self._continue_running(slices)
        if self.counters.num_preemptions == num_preemptions:
            budget = self._admit_waiting(slices, budget)  # not with pages that were just given up
        if not slices:
            return None
        self._use_leftover(slices, budget)
        slices.sort(key=_START)
        slices.sort(key=_NUM_TOKENS)  # stable; twice by a number is cheaper than once by a pair
        num_tokens = sum([one.num_tokens for one in slices])
        num_rows = sum([one.num_samples for one in slices])
        bucket = self.buckets.pick(num_tokens, max(1, num_rows))
        num_steps = 1
        if self.num_decode_steps > 1 and not self.waiting:
            num_steps = count_decode_steps(slices, self.num_decode_steps, self.kv)
        is_awaited = begin(slices, num_steps)
        moves = self.kv.take_moves()
        self.counters.num_copied_pages += len(moves.copies)
        return StepPlan(
            slices=tuple(slices),
            bucket=bucket,
            num_tokens=num_tokens,
            num_steps=num_steps,
            is_awaited=is_awaited,
            scored=scored_ranges(slices),
            **moves._asdict(),
        )

    def _continue_running(self, slices: list[ScheduledSlice]) -> int:
        """Gives the running sequences their tokens, preempting from the end as needed; returns what
        is left of the budget.
        """
        going_on = [seq for seq in self.running if not seq.awaits_its_end]
        to_compute = [seq.num_tokens_to_compute for seq in going_on]
        shares, budget = self.chunk_sizes.share(to_compute, self.waiting)
        running = Status.RUNNING
        for seq, known, num_tokens in zip(going_on, to_compute, shares, strict=True):
            if seq.status is not running:
                break  # it, and all behind it, gave way to those before
            start = seq.next_position
            end = start + num_tokens
            if end > seq.page_table.num_writable and not self._make_room(seq, end):
                break  # it stood last and gave way itself
            slices.append(ScheduledSlice(seq, start, num_tokens, 1 if num_tokens == known else 0))
        return budget

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Grows a running sequence's pages; False if it had to give way itself."""
        while not self.kv.grow(seq.page_table, num_tokens, seq.next_position):
            if self.parked.give_up_newest():
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

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        victim.num_in_flight = 0  # the step under way still tells what it sampled, no more
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
        self.waiting.push(victim)

    def _admit_waiting(self, slices: list[ScheduledSlice], budget: int) -> int:
        """Lets waiting sequences run with what is left of the budget; returns what is left then."""
        partial = [one.seq for one in slices if not one.num_samples]
        passed: set[Sequence] = set()
        num_cached = cache(self.entrance.num_cached)  # looked up once a step, however many join
        num_ending = sum([seq.awaits_its_end for seq in self.running])  # they leave their slots
        while self.waiting and budget > 0:
            num_going_on = len(self.running) - num_ending
            if num_going_on >= self.buckets.max_num_seqs or not self.gate.may_admit(num_going_on):
                break
            seq = self._next_in_line(passed, num_cached)
            if seq is None:
                break
            alone = not partial and len(self.waiting) == 1
            to_compute = len(seq.token_ids) - num_cached(seq)
            most = self.chunk_sizes.first_chunk(to_compute, budget, alone=alone)
            num_tokens = self.entrance.admit(seq, most, self.running, partial)
            if num_tokens == 0:
                break
            self._start(seq)
            slices.append(_slice(seq, num_tokens))
            if not slices[-1].num_samples:
                partial.append(seq)
            budget -= num_tokens
        return budget

    def _next_in_line(self, passed: set[Sequence], num_cached: NumCached) -> Sequence | None:
        """Whom to admit next. Who waits for pages that are on their way holds up the others, or is
        passed, as the policy says.
        """
        for seq in self.waiting.candidates(num_cached):
            if seq in passed or (self.barrier is not None and seq.order[0] >= self.barrier):
                continue
            # Without a tree it would find nothing.
            if self.kv.tree is None or not self.prefix_wait.must_wait(
                seq, self.running, num_cached
            ):
                return seq
            if self.policy.in_order or len(passed) == MAX_PASSED:
                return None
            passed.add(seq)
        return None

    def _start(self, seq: Sequence) -> None:
        if seq in self.parked:
            self.parked.remove(seq)
        elif seq.status is Status.WAITING:
            # A resumed sequence goes on reporting what its first admission found.
            seq.num_cached_tokens = seq.num_computed_tokens
            self.counters.num_queried_tokens += len(seq.token_ids)
            self.counters.num_hit_tokens += seq.num_computed_tokens
        self.waiting.admit(seq)
        self.gate.admitted()
        self.admitted.append(seq)
        seq.status = Status.RUNNING
        position = len(self.running)
        standing = self.policy.standing(seq)
        while position and self.policy.standing(self.running[position - 1]) > standing:
            position -= 1
        self.running.insert(position, seq)

    def _use_leftover(self, slices: list[ScheduledSlice], budget: int) -> None:
        """Tokens that nobody else took make chunks longer, as far as pages allow."""
        for index, one in enumerate(slices):
            if budget <= 0:
                return
            if one.num_samples:
                continue  # it computes all that it has
            num_tokens = min(one.seq.num_tokens_to_compute, one.num_tokens + budget)
            if self.kv.grow(one.seq.page_table, one.start + num_tokens, one.start):
                slices[index] = _slice(one.seq, num_tokens)
                budget -= num_tokens - one.num_tokens

    def update(self, plan: StepPlan, sampled: SampledTokens) -> StepResult:
        """Takes in a step's result: progress, pages for others to find, and the sampled tokens.

        Returns:
            Which sequences got a token (the engine decides whether each of them ends) and which
            failed (the engine ends them).
        """
        result = take_in(plan, sampled, self.kv)
        self.counters.observe(plan)
        return result

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """Learns from how long a step took."""
        self.chunk_sizes.observe(plan, seconds)

    def check_invariants(self) -> None:
        """Raises AssertionError when a queue or the pages are not as the module says."""
        going_on = [seq for seq in self.running if not seq.awaits_its_end]
        assert len(going_on) <= self.buckets.max_num_seqs
        check_queues(
            running=self.running,
            waiting=self.waiting,
            held=self.held,
            parked=self.parked,
            kv=self.kv,
        )


def _slice(seq: Sequence, num_tokens: int) -> ScheduledSlice:
    reaches_end = num_tokens == seq.num_tokens_to_compute
    return ScheduledSlice(seq, seq.next_position, num_tokens, int(reaches_end))
