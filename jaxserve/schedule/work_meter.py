"""How near an engine comes to its roofline: the bytes and operations of its steps beside their time.

Owned by the engine, told of every step by the loop. A few sums of numpy arrays a step. Invariant: what is
counted is what no implementation can avoid (`plan/work.py`), of one device, so shares are never flattered:
padding, copies and programs that read a weight twice only make them smaller.
"""

import numpy as np

from jaxserve.plan.chips import ChipSpec
from jaxserve.plan.models import ModelSpec
from jaxserve.plan.work import StepWork, keys_read, num_pairs
from jaxserve.schedule.batch import DeviceBatch
from jaxserve.stats import RooflineStats


class WorkMeter:
    """Adds up the work of steps.

    Args:
        model: the part of a model that one device holds (`ModelSpec.of_one_chip`).
        dtype: of weights and activations, by numpy's name.
        kv_cache_dtype: of pages, a key of `KV_CACHE_DTYPES`.
        peak_bytes_per_s, peak_flops_per_s: what one device can do; None where nobody knows.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        dtype: str,
        kv_cache_dtype: str = "auto",
        peak_bytes_per_s: float | None = None,
        peak_flops_per_s: float | None = None,
    ):
        self.work = StepWork.of(model, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
        self._windows = model.window_shares
        self._sums = (0.0, 0, 0)  # seconds, bytes, operations
        self._last = (0.0, 0, 0)
        self._least_s = 0.0
        self._peaks: tuple[float | None, float | None] = (peak_bytes_per_s, peak_flops_per_s)

    @classmethod
    def on_chip(
        cls,
        model: ModelSpec,
        chip: ChipSpec | None,
        *,
        dtype: str,
        kv_cache_dtype: str = "auto",
    ) -> "WorkMeter":
        """A meter with the peaks of the chips' table; without any for a chip that is not in it."""
        return cls(
            model,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            peak_bytes_per_s=None if chip is None else chip.hbm_bytes_per_s,
            peak_flops_per_s=None if chip is None else chip.flops_per_s(dtype),
        )

    def set_peaks(self, *, bytes_per_s: float | None, flops_per_s: float | None) -> None:
        """Other peaks from now on, as measured by `device.ceilings`; the sums begin anew.

        Args:
            bytes_per_s, flops_per_s: of one device; None = unknown.
        """
        self._peaks = (bytes_per_s, flops_per_s)
        self._sums = self._last = (0.0, 0, 0)
        self._least_s = 0.0

    def step_done(self, batch: DeviceBatch, num_rows: int, seconds: float) -> None:
        """Takes in a step.

        Args:
            batch: what was sent.
            num_rows: rows that sampled.
            seconds: that it took.
        """
        counts = np.diff(batch.cu_q_lens).astype(np.int64)
        num_tokens = int(counts.sum())
        num_bytes = num_flops = 0
        for index in range(batch.num_steps):
            starts = np.where(counts > 0, batch.kv_lens + index - counts, 0)
            context = pairs = 0.0
            for window, share in self._windows:
                context += share * float(keys_read(starts, counts, window).sum())
                pairs += share * float(num_pairs(starts, counts, window).sum())
            num_bytes += self.work.weight_bytes(num_rows)
            num_bytes += round(self.work.kv_bytes(num_tokens, context))
            num_flops += round(self.work.flops(num_tokens, num_rows, pairs))
        bytes_per_s, flops_per_s = self._peaks
        if bytes_per_s and flops_per_s:
            self._least_s += max(num_bytes / bytes_per_s, num_flops / flops_per_s)
        total_s, total_bytes, total_flops = self._sums
        self._last = (seconds, num_bytes, num_flops)
        self._sums = (total_s + seconds, total_bytes + num_bytes, total_flops + num_flops)

    def stats(self) -> RooflineStats:
        """The sums so far."""
        step_s, num_bytes, num_flops = self._sums
        last_step_s, last_num_bytes, last_num_flops = self._last
        return RooflineStats(
            step_s=step_s,
            num_bytes=num_bytes,
            num_flops=num_flops,
            least_s=self._least_s,
            last_step_s=last_step_s,
            last_num_bytes=last_num_bytes,
            last_num_flops=last_num_flops,
            peak_bytes_per_s=self._peaks[0],
            peak_flops_per_s=self._peaks[1],
        )
