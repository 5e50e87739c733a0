"""`Scorer`: from the output of the last layer to how likely given tokens are, on the device.

Owned by `DeviceExecutor`, which asks it only where a batch wants something scored. It waits for
nothing.
"""

from collections.abc import Iterator

import jax
import numpy as np

from jaxserve.device.programs import ProgramTable
from jaxserve.device.scoring import SCORE_ROWS, ScoredBlock
from jaxserve.device.step_shapes import StepShapes
from jaxserve.model.registry import Params
from jaxserve.schedule.batch import DeviceBatch


class Scorer:
    """Scores the rows of one step after the other.

    Args:
        shapes: of the engine.
        programs: the executor's table.
    """

    def __init__(self, shapes: StepShapes, programs: ProgramTable):
        self._shapes = shapes
        self._programs = programs

    def warm_up(self, head_params: Params) -> None:
        """Runs each program once."""
        block = np.zeros(SCORE_ROWS, np.int32)
        for num_tokens in self._shapes.buckets.tokens:
            shape = self._shapes.abstract_hidden(num_tokens)
            x = self._shapes.placement.put(np.zeros(shape.shape, shape.dtype))
            hidden = self._programs["gather_scored", num_tokens](x, block)
        for name in ("score", "score_top"):
            jax.block_until_ready(self._programs[name, SCORE_ROWS](head_params, hidden, block))

    def __call__(
        self, batch: DeviceBatch, head_params: Params, x: jax.Array
    ) -> Iterator[ScoredBlock]:
        """Scores what a batch wants scored, block by block.

        Args:
            batch: names the rows and their targets.
            head_params: of the model.
            x: [T, E], the output of the last layer.
        """
        gather = self._programs["gather_scored", batch.bucket.num_tokens]
        score = self._programs["score_top" if batch.wants_score_top else "score", SCORE_ROWS]
        for begin in range(0, len(batch.score_rows), SCORE_ROWS):
            part = slice(begin, begin + SCORE_ROWS)
            rows, targets = _padded(batch.score_rows[part]), _padded(batch.score_targets[part])
            yield ScoredBlock(*score(head_params, gather(x, rows), targets))


def _padded(values: np.ndarray) -> np.ndarray:
    """i32[SCORE_ROWS]."""
    padded = np.zeros(SCORE_ROWS, np.int32)
    padded[: len(values)] = values
    return padded
