"""The Protocol between the engine and whatever runs a batch: a device, a fake in tests, a clock in
a simulator.

`submit` and `result` are two calls so that an engine may schedule the next step while this one
runs.
"""

from typing import Protocol

from jaxserve.schedule.batch import DeviceBatch, SampledTokens


class StepHandle(Protocol):
    """A step under way."""

    def result(self) -> SampledTokens:
        """Waits for the step and returns what it sampled."""
        ...


class Executor(Protocol):
    """Owns the KV pages and runs steps in the order they are submitted."""

    @property
    def description(self) -> dict[str, object]:
        """What was chosen: attention_backend, attention_interpret, dtype,
        kv_cache_dtype and the like, for logs and stats."""
        ...

    def warm_up(self) -> None:
        """Makes every bucket ready: after it no request can trigger a compilation."""
        ...

    def submit(self, batch: DeviceBatch) -> StepHandle:
        """Starts a step. The batch's arrays are read-only from here on."""
        ...

    def reset(self) -> None:
        """Forgets what the pages hold, after a step that failed or was interrupted halfway."""
        ...
