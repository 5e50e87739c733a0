"""`Sleep`: whether an engine has its memory, or has given it back to somebody else. Owned by the engine.

    level 0   awake
    level 1   no KV pages, on the device or in host RAM
    level 2   no weights either

Invariant: while the level is above 0 no sequence has pages, so nothing that was computed is missed.
"""

from jaxserve.errors import ConfigError, shown
from jaxserve.executor import Executor
from jaxserve.schedule.scheduler import Scheduler
from jaxserve.schedule.starting_over import give_up_all

LEVELS = (1, 2)


class Sleep:
    """Starts awake.

    Args:
        executor: has the memory.
        scheduler: has the pages in use.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler):
        self.level = 0
        self._executor = executor
        self._scheduler = scheduler

    def begin(self, level: int) -> None:
        """Gives the memory back; said again, the deeper level counts. No step may be under way."""
        self.level = max(self.level, level)
        give_up_all(self._scheduler)
        self._executor.release(params=self.level == 2)

    def end(self) -> None:
        """Takes the memory of the pages again, unless it is awake.

        Raises:
            RuntimeError: there are no weights.
        """
        if self.level == 2:
            raise RuntimeError(
                "Engine.wake: sleep(level=2) gave the weights up; update_params has to come first"
            )
        if self.level:
            self._executor.reset()
            self.level = 0

    def take_params(self) -> None:
        """There are weights again, if there were none."""
        self.level = min(self.level, 1)

    def recover(self) -> None:
        """After a call that was cut short: the memory is as the level says, its contents mean nothing."""
        if self.level:
            self._executor.release(params=self.level == 2)
        else:
            self._executor.reset()

    def check_level(self, level: object, old_run_on: bool) -> None:
        """Raises ConfigError unless `begin` may be told this level.

        Args:
            level: one of LEVELS.
            old_run_on: requests are to end with the weights in use, and others wait.
        """
        if isinstance(level, bool) or level not in LEVELS:
            raise ConfigError(f"level must be one of {LEVELS}, got {shown(level)}")
        if level == 2 and old_run_on:
            raise ConfigError("level=2: requests are still to end with the weights in use")

    def check_may_wait(self) -> None:
        """Raises ConfigError if there are no weights for requests in flight to end with."""
        if self.level == 2:
            raise ConfigError("mode 'finish_old': sleep(level=2) gave the old weights up")
