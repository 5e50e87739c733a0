"""The masks of a step: what the constraints of its sequences let each row sample.

Called by the step loop when the tokens before are known, while the device runs the forward pass of the
step. Pure host code.
"""

import numpy as np

from jaxserve.constraints.constraint import combine_masks, ids_mask, num_words
from jaxserve.errors import ConstraintError
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
    for mask, (seq, start, num_tokens, _) in zip(masks, sampling, strict=True):
        first, end = seq.num_prompt_tokens, start + num_tokens
        if seq.constraints and seq.status is Status.RUNNING and seq.num_known_tokens >= end:
            try:
                combine_masks(seq.constraints, seq.token_ids[first:end].tolist(), mask, vocab_size)
            except ConstraintError as error:
                seq.fault = error.param
                stuck.append(seq)
    return masks, stuck
