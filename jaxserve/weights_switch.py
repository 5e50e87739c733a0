"""`WeightsSwitch`: the weights that an engine will go on with, from when they are given until they are in
use. Owned by the engine.

    give -> (requests before them end with the old ones) -> take_over

Invariant: the weights that the executor runs and the version that the scheduler counts change together,
also where an interrupt comes between: `recover` ends what `take_over` began.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.errors import ConfigError, shown
from jaxserve.executor import Executor
from jaxserve.groups.group import Group
from jaxserve.schedule.scheduler import Scheduler
from jaxserve.schedule.starting_over import change_weights

UPDATE_MODES = ("continue", "finish_old", "abort")


def check_update_mode(mode: object) -> None:
    """Raises ConfigError unless it is one of UPDATE_MODES."""
    if mode not in UPDATE_MODES:
        raise ConfigError(f"mode must be one of {', '.join(UPDATE_MODES)}, got {shown(mode)}")


@dataclass(kw_only=True, slots=True)
class NewWeights:
    """Weights that wait, or are about to be taken.

    Args:
        prepared: from `Executor.prepare_params`.
        version: that tokens of theirs are tagged with.
        barrier: requests of an earlier arrival still run with the old ones.
        is_due: they are being put in place, or were when a call was cut short.
    """

    prepared: object
    version: int
    barrier: int
    is_due: bool = False


class WeightsSwitch:
    """Puts weights in place.

    Args:
        executor: runs them.
        scheduler: counts their versions.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler):
        self.following: NewWeights | None = None
        self._executor = executor
        self._scheduler = scheduler

    def give(self, prepared: object, *, barrier: int) -> int:
        """Says with what to go on, in place of what may have waited: who waits for that has not begun.

        Args:
            prepared: from `Executor.prepare_params`.
            barrier: requests of an earlier arrival, as far as they have begun, end with the old ones.

        Returns:
            The version of the new ones.
        """
        version = self._scheduler.weights_version + 1
        if self.following is not None:
            version = self.following.version + 1
            barrier = min(barrier, self.following.barrier)
        self.following = NewWeights(prepared=prepared, version=version, barrier=barrier)
        return version

    def may_take_over(self, groups: Iterable[Group]) -> bool:
        """Whether weights wait, and none of the requests in flight is to end with the old ones; else
        newer requests are held back.
        """
        new = self.following
        if new is None:
            return False
        is_free = all(group.first.order[0] >= new.barrier for group in groups)
        self._scheduler.barrier = None if is_free else new.barrier
        return is_free

    def take_over(self) -> None:
        """Runs every step from now on with the weights that were given; no step may be under way."""
        new = self.following
        assert new is not None
        new.is_due = True
        self._executor.use_params(new.prepared)
        change_weights(self._scheduler, new.version)
        self._scheduler.barrier, self.following = None, None

    def recover(self) -> None:
        """After a call that was cut short, before the scheduler starts over: ends what was begun."""
        new = self.following
        if new is not None and new.is_due:
            self._executor.use_params(new.prepared)
            self._scheduler.weights_version = new.version
            self._scheduler.barrier, self.following = None, None
