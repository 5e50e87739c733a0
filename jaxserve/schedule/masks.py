"""The masks of a step: what the constraints of its sequences let each row sample.

Made by the step loop when the tokens before are known, while the device runs the layers of the step; kept
as text by the schedule log. Pure host code.
"""

import base64
import dataclasses
import zlib
from typing import Any

import numpy as np

from jaxserve.constraints.constraint import combine_masks, ids_mask, num_words
from jaxserve.errors import ConstraintError
from jaxserve.schedule.batch import SampledTokens
from jaxserve.schedule.plan import StepPlan
from jaxserve.schedule.sequence import Sequence, Status


def make_masks(plan: StepPlan, vocab_size: int) -> tuple[np.ndarray, list[Sequence]]:
    """What the rows of a step may sample.

    Args:
        plan: of the step; of the sequences that still run, all tokens before it are known.
        vocab_size: ids in [0, vocab_size) may be sampled.

    Returns:
        u32[number of logit rows, W], and the sequences whose constraints cannot be followed any more:
        they have to be ended. Every bit of the vocabulary is set where a row has no constraint, needs no
        mask, or belongs to a sequence that has ended since the step was planned, or has to.
    """
    stuck: list[Sequence] = []
    sampling = [one for one in plan.slices if one.num_samples]
    masks = np.tile(ids_mask(num_words(vocab_size), vocab_size), (len(sampling), 1))
    for mask, one in zip(masks, sampling, strict=True):
        seq = one.seq
        first, end = seq.num_prompt_tokens, one.start + one.num_tokens
        if seq.constraints and seq.status is Status.RUNNING and seq.num_known_tokens >= end:
            try:
                combine_masks(seq.constraints, seq.token_ids[first:end].tolist(), mask, vocab_size)
            except ConstraintError as error:
                seq.fault = error.code or error.param
                stuck.append(seq)
    return masks, stuck


def without(stuck: list[Sequence], plan: StepPlan, sampled: SampledTokens) -> SampledTokens:
    """A step's result in which the rows of some sequences have failed."""
    if not stuck:
        return sampled
    finite = sampled.finite.copy()
    finite[[one.seq in stuck for one in plan.slices]] = False
    return dataclasses.replace(sampled, finite=finite)


MAX_WORDS = 2**20  # of a mask that is read; no vocabulary is as large


def write_masks(masks: np.ndarray) -> list[int | str]:
    """Masks u32[n, W] as [W, text]: their little-endian bytes, deflated, in base64."""
    packed = zlib.compress(masks.astype("<u4").tobytes())
    return [masks.shape[1], base64.b64encode(packed).decode("ascii")]


def read_masks(written: Any, num_rows: int) -> np.ndarray:
    """Undoes `write_masks`: u32[num_rows, W].

    Raises:
        ValueError: it is nothing that `write_masks` gives for so many rows.
    """
    num_words, text = written
    if type(num_words) is not int or not 0 < num_words <= MAX_WORDS:
        raise ValueError(f"masks of {num_words!r} words")
    num_bytes = 4 * num_words * num_rows
    unpack = zlib.decompressobj()
    try:
        found = unpack.decompress(base64.b64decode(text, validate=True), num_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"masks: {error}") from None
    if len(found) != num_bytes:
        raise ValueError(f"masks of {len(found)} bytes or more, not {num_bytes}")
    return np.frombuffer(found, "<u4").astype(np.uint32).reshape(num_rows, num_words)
