"""`DeviceStep`: a step under way, and how what it returns becomes `SampledTokens`.

Made by the executor, one per submitted batch. Invariant: whatever went wrong in a step is raised by
`result`, also where `wait` has waited for it.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.device.row_programs import Told
from jaxserve.device.row_sampler import RowOutputs
from jaxserve.device.scoring import ScoredBlock, fetched_scores
from jaxserve.schedule.batch import DeviceBatch, SampledTokens
from pallas_kernels.native.cores import step_aside


class StepOutputs(NamedTuple):
    """What the programs of one step return, on the device.

    Args:
        slices_finite: bool[S]; among `rows` too, which is where the host reads it then.
        rows: what was sampled; None where nothing is.
        scored: of each block of rows that are scored; none where nothing is.
    """

    slices_finite: jax.Array
    rows: RowOutputs | None = None
    scored: Sequence[ScoredBlock] = ()


class DeviceStep:
    """A step under way; `result` waits for it. Meets `jaxserve.executor.StepHandle`.

    Args:
        batch: what was submitted; of several steps in one, the last.
        outputs: of each of its steps.
        settle: writes the pages that left the device to host RAM; waits for them.
        sample: samples the rows of a step that awaits masks, given them; None for any other step.
    """

    def __init__(
        self,
        batch: DeviceBatch,
        outputs: Sequence[StepOutputs],
        *,
        settle: Callable[[], None],
        sample: Callable[[np.ndarray], RowOutputs] | None = None,
    ):
        self._batch = batch
        self._outputs = outputs
        self._settle = settle
        self._sample = sample
        self.is_done = False

    def give_masks(self, masks: np.ndarray) -> None:
        """Starts the rest of a step that awaits masks.

        Args:
            masks: u32[num_rows, W], as in `jaxserve.executor.StepHandle`.

        Raises:
            RuntimeError: the step awaits none.
        """
        if self._sample is None:
            raise RuntimeError("give_masks: this step awaits no masks")
        (forward,) = self._outputs
        self._outputs, self._sample = [forward._replace(rows=self._sample(masks))], None

    def is_ready(self) -> bool:
        """See `jaxserve.executor.StepHandle`."""
        return self._sample is None and all(one.is_ready() for one in self._arrays())

    def wait(self) -> None:
        """See `jaxserve.executor.StepHandle`."""
        with contextlib.suppress(Exception):  # `result` raises it
            jax.block_until_ready(self._arrays())

    def _arrays(self) -> list[Any]:
        return jax.tree.leaves(list(self._outputs))

    def result(self) -> SampledTokens:
        """Blocks until the step is done, also when it samples nothing.

        Raises:
            RuntimeError: the step awaits masks.
        """
        if self._sample is not None:
            raise RuntimeError("result: this step awaits masks; give_masks comes first")
        try:
            self._settle()  # those pages left before the step began: write them while it runs
            fetched = jax.device_get([_told(one) for one in self._outputs])
            step_aside()  # the next step runs already
            return _one_after_the_other([sampled_tokens(self._batch, *one) for one in fetched])
        finally:
            self.is_done = True


def _told(outputs: StepOutputs) -> tuple[Any, ...]:
    """What `sampled_tokens` takes, and nothing twice: each array that is fetched takes the host some
    time.
    """
    slices_finite, rows, scored = outputs
    return (slices_finite if rows is None else None, rows, scored)


def _one_after_the_other(steps: Sequence[SampledTokens]) -> SampledTokens:
    """What several steps of the same rows sampled, as one: M tokens a row."""
    first, *rest = steps
    if not rest:
        return first
    return SampledTokens(
        token_ids=np.concatenate([one.token_ids for one in steps], axis=1),
        num_tokens=np.full(len(first.token_ids), len(steps), np.int32),
        logprobs=np.concatenate([one.logprobs for one in steps], axis=1),
        finite=np.logical_and.reduce([one.finite for one in steps]),
        candidate_ids=_joined([one.candidate_ids for one in steps]),
        candidate_logprobs=_joined([one.candidate_logprobs for one in steps]),
    )


def _joined(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Arrays [S, 1, K] of steps that follow each other as [S, M, K]; None where they are none."""
    known = [one for one in arrays if one is not None]
    return np.concatenate(known, axis=1) if known else None


def sampled_tokens(
    batch: DeviceBatch,
    slices_finite: np.ndarray | None,
    rows: RowOutputs | None,
    scored: Sequence[ScoredBlock] = (),
) -> SampledTokens:
    """Cuts the padding off what the programs returned and puts it together.

    Args:
        batch: what was submitted.
        slices_finite, rows, scored: as in `StepOutputs`, fetched.
    """
    num_slices, num_rows = int(batch.ranges[2]), batch.num_rows
    told = None if rows is None else Told.read(rows.told, batch.bucket.num_rows)
    slices_finite = slices_finite if told is None else told.slices_finite
    assert slices_finite is not None
    finite = np.array(slices_finite[:num_slices])
    ends = batch.cu_q_lens[1 : num_slices + 1]

    def mark(tokens: np.ndarray, are_finite: np.ndarray) -> None:
        # A token belongs to the first slice that ends beyond it; to none in a padding batch.
        owners = np.searchsorted(ends, tokens, side="right")
        finite[owners[(owners < num_slices) & ~are_finite]] = False

    if told is None:
        token_ids, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    else:
        token_ids, logprobs = told.token_ids[:num_rows], told.logprobs[:num_rows]
        mark(batch.logit_rows[:num_rows], told.rows_finite[:num_rows])
    scores = None
    if scored:
        scores, scores_finite = fetched_scores(scored, len(batch.score_rows))
        mark(batch.score_rows, scores_finite)
    ids_of, logprobs_of = (rows and rows.candidates) or (None, None)
    return SampledTokens(
        token_ids=token_ids[:, None],
        num_tokens=np.ones(len(token_ids), np.int32),
        logprobs=logprobs[:, None],
        finite=finite,
        candidate_ids=None if ids_of is None else ids_of[:num_rows, None],
        candidate_logprobs=None if logprobs_of is None else logprobs_of[:num_rows, None],
        scores=scores,
    )
