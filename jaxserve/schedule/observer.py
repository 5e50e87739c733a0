"""Who looks on while an engine runs: `StepObserver`, called by `Engine.step` once per step.

An engine has none unless somebody puts one into `Engine.observers`; observers change nothing. `--stats_file`
and `--schedule_log` are two of them.
"""

from typing import NamedTuple, Protocol

import numpy as np

from jaxserve.schedule.batch import DeviceBatch, SampledTokens
from jaxserve.schedule.plan import StepPlan, StepResult


class StepRecord(NamedTuple):
    """A step that was run.

    Args:
        plan: what was decided. Its sequences have moved on since: some have ended and have no pages
            any more.
        batch: what the executor was given; what the page tables were stands there.
        sampled: what it returned.
        result: what became of the sequences.
        seconds: from its start, or the end of the step before it if that was later, to its result.
        following: the step that was sent before this one's result was known; None if there is none.
            It still computes for sequences that ended in this one.
        masks: what its rows were allowed to sample, u32[num_rows, W]; None where it awaited none.
    """

    plan: StepPlan
    batch: DeviceBatch
    sampled: SampledTokens
    result: StepResult
    seconds: float
    following: StepPlan | None = None
    masks: np.ndarray | None = None


class StepObserver(Protocol):
    """Called between the end of a step and the release of its outputs.

    One that raises ends the step there; the engine then loses nothing, as after any interruption.
    """

    def step_done(self, step: StepRecord) -> None:
        """A step has run, its sequences have their tokens, and those that ended are gone."""
        ...

    def weights_changed(self) -> None:
        """All further steps are run with other weights."""
        ...
