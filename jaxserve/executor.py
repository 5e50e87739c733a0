"""The Protocol between the engine and whatever runs a batch: a device, a fake in tests, a clock in
a simulator.

`submit` and `result` are two calls so that an engine may schedule the next step while this one
runs.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxserve.schedule.batch import DeviceBatch, SampledTokens


class StepHandle(Protocol):
    """A step under way."""

    def give_masks(self, masks: np.ndarray) -> None:
        """Lets a step go on whose batch awaits masks; once, and before the next step is submitted or
        this one's result asked for.

        Args:
            masks: u32[num_rows, W], W = ceil(vocabulary / 32): bit i % 32 of word i // 32 is set where
                the row may sample token i.
        """
        ...

    def is_ready(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def wait(self) -> None:
        """Returns when `result` would not wait; changes nothing, so any thread may call it. What went
        wrong in the step is raised by `result` alone."""
        ...

    def result(self) -> SampledTokens:
        """Waits for the step and returns what it sampled."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What work costs here, for decisions between recomputing and moving pages.

    Args:
        token_s: seconds to compute one token as part of a full chunk.
        page_move_s: seconds to move one page, all layers, between device and host, one way.
    """

    token_s: float
    page_move_s: float


class Executor(Protocol):
    """Owns the KV pages, on the device and in host RAM, and runs steps in the order they are
    submitted.
    """

    @property
    def description(self) -> dict[str, object]:
        """What was chosen: attention_backend, attention_interpret, dtype,
        kv_cache_dtype and the like, for logs and stats."""
        ...

    @property
    def costs(self) -> StepCosts:
        """As measured by `warm_up`."""
        ...

    def warm_up(self) -> None:
        """Makes every bucket ready: after it no request can trigger a compilation."""
        ...

    def submit(self, batch: DeviceBatch) -> StepHandle:
        """Starts a step: its page moves out, copies and moves in, then the batch itself, num_steps
        times. The batch before may still be computed: its tokens are read on the device where
        token_ids name its rows. The arrays are read-only from here on. Of a batch that awaits masks
        the layers start, and the rest with `give_masks`."""
        ...

    def prepare_params(self, params: object) -> Any:
        """Other weights, checked and on the device, beside those in use; for `use_params`.

        Raises:
            ConfigError: another tree, shape or type than the executor's own.
        """
        ...

    def use_params(self, prepared: Any) -> None:
        """Runs every step from now on with what `prepare_params` made; doing so twice changes nothing.
        No step may be under way."""
        ...

    def release(self, *, params: bool) -> None:
        """Gives the memory of the pages back, on the device and in host RAM, until `reset`; and with
        `params` that of the weights, until `use_params`. No step may be under way."""
        ...

    def reset(self) -> None:
        """Forgets what the pages hold, after a step that failed or was interrupted halfway."""
        ...
