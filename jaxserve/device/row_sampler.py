"""`RowSampler`: from the hidden rows of a step to its tokens, on the device.

Owned by `DeviceExecutor`. It calls the programs of R in their order and keeps what the next step may
read: the tokens sampled last. It waits for nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.device.programs import ProgramTable
from jaxserve.device.row_programs import RawLogits, Sampled, sampling_rows
from jaxserve.device.step_shapes import StepShapes
from jaxserve.model.registry import Params
from jaxserve.schedule.batch import DeviceBatch


class RowOutputs(NamedTuple):
    """What the logit rows of a step give, on the device.

    Args:
        sampled: (token ids i32[R], logprobs f32[R], finite bool[R]).
        candidates: (token ids i32[R, K], logprobs f32[R, K]), where wanted.
    """

    sampled: tuple[jax.Array, ...]
    candidates: tuple[jax.Array, ...] | None


class RowSampler:
    """Samples the rows of one step after the other.

    Args:
        shapes: of the engine.
        programs: the executor's table.
    """

    def __init__(self, shapes: StepShapes, programs: ProgramTable):
        self._shapes = shapes
        self._programs = programs

    def reset(self) -> None:
        """Forgets what was sampled."""
        last_ids = self._shapes.abstract_last_ids
        self.last_ids = jnp.zeros(last_ids.shape, last_ids.dtype)

    def __call__(self, batch: DeviceBatch, head_params: Params, hidden: jax.Array) -> RowOutputs:
        """Samples one token for each logit row of a batch, which has some.

        Args:
            batch: of the step.
            head_params: of the model.
            hidden: [S, E], from `select`.
        """
        num_rows = batch.bucket.num_rows
        raw = RawLogits(*self._programs["head", num_rows](head_params, hidden))
        rows = sampling_rows(batch)
        processed = raw.logits
        outputs = Sampled(*self._programs["sample", num_rows](raw.logits, processed, rows))
        self.last_ids = outputs.last_ids
        candidates = None
        if batch.wants_candidates:
            candidates = self._programs["candidates", num_rows](raw.logits, processed, rows)
        return RowOutputs((outputs.token_ids, outputs.logprobs, raw.finite), candidates)
