"""The loop under the engine: schedule -> submit -> result -> update, with up to one step ahead.

    device    | step N          | step N+1        |
    host      | plan N+1, send  | take in N, hand out, plan N+2, send | ...

Owned by the engine. With `async_scheduling` the next step is planned and sent before the last one's
result is known: each sequence goes on with a token that only the device has seen yet, so the device
never waits for the host. Where tokens have to keep to constraints, the device runs the layers of a step
meanwhile and awaits the masks, which are made as soon as the tokens before are known. What a step hands
out, and in which order, is the same either way; a sequence that turns out to have ended is computed once
more for nothing.

Invariant: between two calls at most one step is under way, or two after `begin`, which whoever has
several engines calls to send to all of them before it waits for one; `forget` and `drain` leave none.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jaxserve.executor import Executor, StepHandle
from jaxserve.schedule.batch import DeviceBatch
from jaxserve.schedule.batch_builder import BatchBuilder
from jaxserve.schedule.masks import make_masks, without
from jaxserve.schedule.observer import StepObserver, StepRecord
from jaxserve.schedule.plan import StepPlan, StepResult
from jaxserve.schedule.scheduler import Scheduler
from jaxserve.schedule.sequence import Sequence
from jaxserve.schedule.work_meter import WorkMeter
from jaxserve.stats import RooflineStats


@dataclass(kw_only=True)
class StepUnderWay:
    """A step that was sent and whose result is not known yet.

    Args:
        plan, batch: what was sent.
        handle: gives its result.
        sent_s: when, by the clock.
        masks: what it was told that its rows may sample, u32[num_rows, W]; None where nobody asks.
        stuck: sequences with nothing that their rows may sample: they fail with this step.
    """

    plan: StepPlan
    batch: DeviceBatch
    handle: StepHandle
    sent_s: float
    masks: np.ndarray | None = None
    stuck: list[Sequence] = field(default_factory=list)


class StepLoop:
    """Runs steps one after the other.

    Args:
        executor: runs the batches.
        scheduler: decides what each step computes.
        take_in: told what became of the sequences of a step, right after it, and when it was done.
        observers: look on at every step; may be added to at any time.
        clock: seconds.
        async_scheduling: plan and send a step before the last one's result is known.
        vocab_size: ids in [0, vocab_size) may be sampled.
        meter: told of every step's work and time; None = nobody asks.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        scheduler: Scheduler,
        take_in: Callable[[StepResult, float], None],
        observers: list[StepObserver],
        clock: Callable[[], float],
        async_scheduling: bool,
        vocab_size: int,
        meter: WorkMeter | None = None,
    ):
        self.executor = executor
        self.scheduler = scheduler
        self._observers = observers
        self.async_scheduling = async_scheduling
        self._take_in = take_in
        self._clock = clock
        self._vocab_size = vocab_size
        self.meter = meter
        self.build_batch = BatchBuilder(scheduler.buckets, scheduler.kv.max_pages_per_seq)
        self._under_way: StepUnderWay | None = None
        self._following: StepUnderWay | None = None  # sent behind it
        self._last_done_s = 0.0

    def begin(self) -> StepHandle | None:
        """Sends what can be sent without a result: a step if none is under way, and the next one where
        that is possible. Waits for nothing.

        Returns:
            The step that `step` would finish; None when there is none.
        """
        if self._under_way is None:
            current = self._send_next()
            if current is None:
                return None
            self._give_masks(current)
            self._under_way = current
        may_run_ahead = self.async_scheduling and not self._under_way.plan.is_awaited
        if may_run_ahead and self._following is None:
            self._following = self._send_next()
        return self._under_way.handle

    def step(self) -> None:
        """Finishes one step, and sends the next one first where that is possible."""
        self.begin()
        self._finish_first()

    def roofline_stats(self) -> RooflineStats | None:
        """The work of all steps beside their time; None without a meter."""
        return None if self.meter is None else self.meter.stats()

    def drain(self) -> None:
        """Finishes what is under way, and sends nothing."""
        while self._under_way is not None:
            self._finish_first()

    def forget(self) -> None:
        """Wants no result any more: what was sent is void."""
        self._under_way = self._following = None
        self.build_batch.forget()

    def _send_next(self) -> StepUnderWay | None:
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        sent_s = self._clock()
        for seq in self.scheduler.admitted:
            if seq.first_scheduled_s is None:  # not one that comes back
                seq.first_scheduled_s = sent_s
        batch = self.build_batch(plan)
        handle = self.executor.submit(batch)
        return StepUnderWay(plan=plan, batch=batch, handle=handle, sent_s=sent_s)

    def _give_masks(self, step: StepUnderWay) -> None:
        """Lets a step go on that awaits masks: the tokens before it are known now."""
        if step.batch.awaits_masks:
            step.masks, step.stuck = make_masks(step.plan, self._vocab_size)
            step.handle.give_masks(step.masks)

    def _finish_first(self) -> None:
        if self._under_way is not None:
            self._finish(self._under_way, self._following)
            self._under_way, self._following = self._following, None

    def _finish(self, step: StepUnderWay, following: StepUnderWay | None) -> None:
        # Of a step whose sequences have all ended nobody may have asked for long: the engine was idle.
        is_void = step.plan.is_void
        begin_s = self._clock() if is_void else max(step.sent_s, self._last_done_s)
        sampled = step.handle.result()
        now_s = self._clock()
        seconds = now_s - begin_s
        self._last_done_s = now_s
        result = self.scheduler.update(step.plan, without(step.stuck, step.plan, sampled))
        self._take_in(result, now_s)
        if following is not None:
            self._give_masks(following)
        if not is_void:
            self.scheduler.observe_step(step.plan, seconds)
            if self.meter is not None:
                self.meter.step_done(step.batch, step.batch.num_rows, seconds)
        next_plan = None if following is None else following.plan
        for observer in self._observers:
            observer.step_done(
                StepRecord(step.plan, step.batch, sampled, result, seconds, next_plan, step.masks)
            )
