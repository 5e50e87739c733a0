"""`RowSampler`: from the hidden rows of a step to its tokens, on the device.

Owned by `DeviceExecutor`. It calls the programs of R in their order and keeps what later steps read:
the tokens sampled last, and the count table. It waits for nothing.

Invariant: the count table is donated to every program that writes it, so it exists once.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.device.kv_pool import make_count_table
from jaxserve.device.programs import ProgramTable
from jaxserve.device.row_programs import (
    RawLogits,
    Sampled,
    bias_rows,
    penalty_rows,
    sampling_rows,
)
from jaxserve.device.shared_inputs import SharedInputs
from jaxserve.device.step_shapes import COUNT_PIECE, StepShapes
from jaxserve.model.registry import Params
from jaxserve.schedule.batch import CountLoad, DeviceBatch


class RowOutputs(NamedTuple):
    """What the logit rows of a step give: on the device, or fetched from it as numpy.

    Args:
        told: i32[3 R + S], to be read by `row_programs.Told`.
        candidates: (token ids i32[R, K], logprobs f32[R, K]), where wanted.
    """

    told: Any
    candidates: tuple[Any, ...] | None


class RowSampler:
    """Samples the rows of one step after the other.

    Args:
        shapes: of the engine.
        programs: the executor's table.
        inputs: the executor's.
    """

    def __init__(self, shapes: StepShapes, programs: ProgramTable, inputs: SharedInputs):
        self._shapes = shapes
        self._programs = programs
        self._inputs = inputs
        # What rows without options are given beside rows that have some; on the device once for all.
        self._no_options = {
            r: shapes.placement.put(shapes.no_options(r)) for r in shapes.buckets.rows
        }

    def reset(self) -> None:
        """Forgets what was sampled."""
        last_ids = self._shapes.abstract_last_ids
        self.last_ids = self._shapes.placement.put(np.zeros(last_ids.shape, last_ids.dtype))
        self._counts = make_count_table(self._programs)

    def release(self) -> None:
        """Gives its memory back until `reset`, all that grows with the number of sequences."""
        self.last_ids = self._counts = None  # type: ignore[assignment]

    def __call__(
        self,
        batch: DeviceBatch,
        head_params: Params,
        hidden: jax.Array,
        slices_finite: jax.Array,
        masks: np.ndarray | None = None,
    ) -> RowOutputs:
        """Samples one token for each logit row of a batch, which has some.

        Args:
            batch: of the step.
            head_params: of the model.
            hidden, slices_finite: [S, E] and bool[S], from `select`.
            masks: u32[num_rows, W], where the batch awaits them.
        """
        num_rows = batch.bucket.num_rows
        raw = RawLogits(*self._programs["head", num_rows](head_params, hidden))
        rows = self._inputs.put(sampling_rows(batch), but=("output_positions",))
        processed = raw.logits
        if masks is not None or batch.penalties is not None or batch.logit_bias is not None:
            processed = self._process(batch, raw.logits, masks)
        sample = self._programs["sample", num_rows]
        outputs = Sampled(*sample(raw.logits, processed, raw.finite, slices_finite, rows))
        self.last_ids = outputs.last_ids
        if batch.penalties is not None:
            count = self._programs["count", num_rows]
            self._counts = count(self._counts, batch.penalties.slots, outputs.token_ids)
        candidates = None
        if batch.wants_candidates:
            candidates = self._programs["candidates", num_rows](raw.logits, processed, rows)
        return RowOutputs(outputs.told, candidates)

    def _process(
        self, batch: DeviceBatch, logits: jax.Array, masks: np.ndarray | None
    ) -> jax.Array:
        num_rows = batch.bucket.num_rows
        for load in batch.count_loads:
            self._load(load)
        penalties, bias, all_allowed = self._no_options[num_rows]
        if batch.penalties is not None:
            penalties = penalty_rows(batch.penalties)
        if batch.logit_bias is not None:
            bias = bias_rows(batch.logit_bias)
        if masks is not None:
            padded = np.full(all_allowed.shape, 0xFFFFFFFF, np.uint32)
            padded[: len(masks), : masks.shape[1]] = masks
            all_allowed = padded
        process = self._programs["process", num_rows]
        return process(logits, self._counts, penalties, bias, all_allowed)

    def _load(self, load: CountLoad) -> None:
        program = self._programs["load_counts", COUNT_PIECE]
        slot = np.array(load.slot, np.int32)
        for index, (token_ids, amounts) in enumerate(_pieces(load)):
            starts_over = np.array(index == 0)
            self._counts = program(self._counts, slot, starts_over, token_ids, amounts)


def _pieces(load: CountLoad) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(token ids, amounts) i32[COUNT_PIECE] of a history, padded with (0, 0)."""
    for begin in range(0, len(load.token_ids), COUNT_PIECE):
        piece = np.zeros((2, COUNT_PIECE), np.int32)
        part = slice(begin, begin + COUNT_PIECE)
        size = len(load.token_ids[part])
        piece[0, :size], piece[1, :size] = load.token_ids[part], load.amounts[part]
        yield piece[0], piece[1]
