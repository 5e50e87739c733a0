"""The simulator: the real scheduler, page pool and radix tree, with a clock in place of a device.

    arrivals -> Scheduler.add -> schedule -> (the clock moves on by the plan's cost) -> update -> finish

Called by `jaxserve simulate` and the figures' script. The `Engine` is left out: text, outputs and
arrays for a device cost time and decide nothing. What is generated is one negative id per request,
again and again: no prompt holds it, so nothing that was generated is ever found by another request.

Invariant: the clock moves only by the cost of steps and to the next arrival, so two runs of one config
and trace are equal to the last digit.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxserve.errors import JaxserveError
from jaxserve.plan.simulate.contiguous import ContiguousKVManager
from jaxserve.plan.simulate.report import Measures, SimulationResult
from jaxserve.plan.simulate.settings import SimulationConfig, build_setup
from jaxserve.plan.traces import Trace, TraceRequest
from jaxserve.request import Request
from jaxserve.schedule.batch import SampledTokens
from jaxserve.schedule.plan import StepPlan
from jaxserve.schedule.sequence import Sequence

COUNTERS = (
    "num_preemptions",
    "num_swaps",
    "num_recomputes",
    "num_copied_pages",
    "num_prefix_waits",
    "num_prefix_wait_steps",
)


class SimulationError(JaxserveError):
    """The scheduler stopped with requests left: a fault of the scheduler, not of the trace."""


@dataclass(slots=True)
class _Live:
    """A request in flight."""

    request: TraceRequest
    seq: Sequence
    arrival_s: float
    num_left: int  # output tokens to come
    last_token_s: float = -1.0  # negative: none yet


def simulate(config: SimulationConfig, trace: Trace) -> SimulationResult:
    """Replays a trace.

    Args:
        config: what to simulate.
        trace: the requests.

    Returns:
        What was measured.

    Raises:
        ConfigError: the trace does not fit the config.
        SimulationError: the scheduler gave up before every request was done.
    """
    started = time.perf_counter()
    simulator = Simulator(config, trace)
    simulator.run()
    return SimulationResult(
        trace=trace,
        measures=simulator.measures,
        num_pages=simulator.num_pages,
        counters={name: getattr(simulator.scheduler.counters, name) for name in COUNTERS},
        wall_s=time.perf_counter() - started,
    )


class Simulator:
    """One run; `simulate` is the usual way to it.

    Args:
        config: what to simulate.
        trace: the requests.
    """

    def __init__(self, config: SimulationConfig, trace: Trace):
        setup = build_setup(config, trace)
        self.scheduler = setup.scheduler
        self.num_pages = setup.num_pages
        self.measures = Measures(page_size=config.page_size)
        self.now_s = 0.0
        self._roofline = setup.roofline
        self._move_s = setup.roofline.page_move_s(config.page_size)
        self._copy_s = setup.roofline.page_copy_s(config.page_size)
        self._sequential = config.arrivals == "sequential"
        self._rate_scale = config.rate_scale
        self._live: dict[Sequence, _Live] = {}
        self._arrivals: Iterator[TraceRequest] = iter(trace.requests)
        self._next: TraceRequest | None = next(self._arrivals)
        most = setup.scheduler.buckets.max_num_seqs
        self._ones = np.ones(most, np.int32)
        self._finite = np.ones(most, np.bool_)
        self._logprobs = np.zeros((most, 1), np.float32)

    def run(self) -> None:
        """Goes on until every request of the trace is done."""
        while self._next is not None or self.scheduler.has_work():
            self._take_arrivals()
            plan = self.scheduler.schedule()
            if plan is not None:
                self._run_step(plan)
            elif self._next is not None:
                self.now_s = max(self.now_s, self._next.arrival_s / self._rate_scale)
            else:
                raise SimulationError(
                    f"the scheduler plans nothing at {self.now_s:g} s with {len(self._live)} requests "
                    "left"
                )
        self.measures.end_s = self.now_s

    def check_invariants(self) -> None:
        """Raises AssertionError when queues, pages or the requests in flight do not add up."""
        self.scheduler.check_invariants()
        queued = {*self.scheduler.running, *self.scheduler.waiting}
        assert queued == set(self._live), "a request is lost"

    def _take_arrivals(self) -> None:
        while self._next is not None:
            if self._sequential:
                if self._live:
                    return
                arrival_s = self.now_s
            else:
                arrival_s = self._next.arrival_s / self._rate_scale
                if arrival_s > self.now_s:
                    return
            self._add(self._next, arrival_s)
            self._next = next(self._arrivals, None)

    def _add(self, request: TraceRequest, arrival_s: float) -> None:
        prompt = request.prompt_token_ids(whole_blocks=self._sequential)
        num_output = 1 if self._sequential else request.num_output_tokens
        kv = self.scheduler.kv
        if isinstance(kv, ContiguousKVManager):
            table = kv.reserved_table(len(prompt) + num_output)
        else:
            table = kv.new_table()
        seq = Sequence(
            request=Request(id=str(request.index), prompt_token_ids=prompt),
            prompt_token_ids=prompt,
            order=(request.index, 0),
            seed=0,
            max_tokens=num_output,
            stop_ids=frozenset(),
            page_table=table,
        )
        self._live[seq] = _Live(request, seq, arrival_s, num_output)
        self.scheduler.add(seq)

    def _run_step(self, plan: StepPlan) -> None:
        """Moves the clock on by a step, and everybody in it by their tokens."""
        num_context = num_pairs = num_table_pages = 0
        ids: list[int] = []
        for one in plan.slices:
            start, num_tokens = one.start, one.num_tokens
            end = start + num_tokens
            num_context += end
            if num_tokens == 1:
                num_pairs += end
            else:
                num_pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2
            num_table_pages += len(one.seq.page_table)
            if one.num_samples:
                ids.append(-1 - one.seq.order[0])
        seconds = self._roofline.step_s(
            num_tokens=plan.num_tokens,
            num_logit_rows=len(ids),
            num_context_tokens=num_context,
            num_pairs=num_pairs,
        )
        # Moves and copies run before the step, in a queue with it.
        seconds += self._move_s * (len(plan.moves_out) + len(plan.moves_in))
        seconds += self._copy_s * len(plan.copies)
        self.now_s += seconds
        measures = self.measures
        measures.num_steps += 1
        measures.busy_s += seconds
        measures.num_computed_tokens += plan.num_tokens
        measures.num_running_most = max(measures.num_running_most, len(plan.slices))
        # Shared pages are full, so the slots without a token are those at the ends of the tables.
        num_slots = self.scheduler.kv.num_owned_pages * measures.page_size
        num_empty = num_table_pages * measures.page_size - num_context
        measures.owned_slot_s += num_slots * seconds
        measures.held_token_s += (num_slots - num_empty) * seconds
        self._take_tokens(plan, ids)
        self.scheduler.observe_step(plan, seconds)

    def _take_tokens(self, plan: StepPlan, ids: list[int]) -> None:
        num_rows = len(ids)
        sampled = SampledTokens(
            token_ids=np.array(ids, np.int32).reshape(num_rows, 1),
            num_tokens=self._ones[:num_rows],
            logprobs=self._logprobs[:num_rows],
            finite=self._finite[: len(plan.slices)],
        )
        now_s, measures = self.now_s, self.measures
        for seq in self.scheduler.update(plan, sampled).advanced:
            live = self._live[seq]
            if live.last_token_s < 0:
                measures.first_token(live.request.num_prompt_tokens, now_s - live.arrival_s)
            else:
                measures.itl_s.append(now_s - live.last_token_s)
                measures.itl_end_s.append(now_s)
            live.last_token_s = now_s
            live.num_left -= 1
            if not live.num_left:
                self._finish(live)
        measures.num_output_tokens += num_rows

    def _finish(self, live: _Live) -> None:
        self.scheduler.finish(live.seq)
        del self._live[live.seq]
        num_blocks = 0 if live.request.blocks is None else len(live.request.blocks)
        self.measures.e2el_s.append(self.now_s - live.arrival_s)
        self.measures.finished(
            len(live.seq.prompt_token_ids), live.seq.num_cached_tokens, num_blocks
        )
