"""Steps whose result is not known yet: how many device steps one may take, and what it leaves marked
in its sequences until the result is here. Used by the scheduler.

The next step may be planned, and sent, while one is under way: everything that it reads (pages, and
the tokens sampled last) is written on the device before it. What it cannot know is whether a sequence
has ended; one that has is computed once more for nothing, and `take_in` passes over it.

Invariant: at most one step is under way when another one is planned, so a pending token is always one
of the step before.
"""

from collections.abc import Sequence as Several

from jaxserve.pages.kv_manager import KVManager
from jaxserve.schedule.batch import SampledTokens
from jaxserve.schedule.plan import ScheduledSlice, StepPlan, StepResult
from jaxserve.schedule.sequence import Candidates


def count_decode_steps(slices: Several[ScheduledSlice], most: int, kv: KVManager) -> int:
    """How many tokens of each sequence a step may compute one after the other: 1 unless every slice
    is a token that samples, and no sequence would get more than it asked for. Takes the pages.

    Args:
        slices: of the step.
        most: as many as are wanted.
        kv: owner of the pages.
    """
    for one in slices:
        if one.num_tokens > 1 or not one.num_samples or one.seq.is_awaited:
            return 1
        most = min(most, one.seq.max_num_tokens - one.start)
    if most > 1:
        for one in slices:
            if not kv.grow(one.seq.page_table, one.start + most, one.start):
                return 1
    return most


def begin(slices: Several[ScheduledSlice], num_steps: int) -> bool:
    """Marks in each sequence what a step that is about to be sent will do.

    Args:
        slices: in the order of the batch.
        num_steps: tokens of each slice that follow each other.

    Returns:
        Whether the host has to see what it samples before another step is planned.
    """
    row, more, is_awaited = 0, num_steps - 1, False
    for one in slices:
        seq = one.seq
        seq.num_in_flight += one.num_tokens + more
        if not one.num_samples:
            continue
        if not seq.wants_candidates:
            seq.token_ids.append(-1 - row)
            if more:
                seq.token_ids.extend([-1 - row] * more)
        row += 1
        is_awaited = is_awaited or seq.is_awaited
    return is_awaited


def take_in(plan: StepPlan, sampled: SampledTokens, kv: KVManager) -> StepResult:
    """Puts what a step computed and sampled into its sequences, and pages that it filled in the tree.

    Passed over are sequences that have ended since it was planned, and, of one that was preempted
    since, all but the tokens that it sampled.
    """
    result = StepResult([], [])
    # All at once: taking numbers out of an array one by one is slow.
    # By column, one after the other: nearly always there is one, and no lists are made for the rows.
    columns = list(zip(sampled.token_ids.T.tolist(), sampled.logprobs.T.tolist(), strict=True))
    finite = sampled.finite.tolist()
    row, page_size, more = 0, kv.page_size, plan.num_steps - 1
    for one, is_finite in zip(plan.slices, finite, strict=True):
        seq, num_tokens, first_row = one.seq, one.num_tokens, row
        row += one.num_samples
        seq.num_iterations += 1
        if not seq.num_in_flight and not seq.num_pending:
            continue  # it has ended
        if not is_finite:
            seq.forget_step()
            result.failed.append(seq)
            continue
        if one.num_samples and not seq.wants_candidates:
            position = one.start + num_tokens
            for token_ids, logprobs in columns:
                seq.token_ids[position] = token_ids[first_row]  # in the place of a pending one
                seq.logprobs.append(logprobs[first_row])
                position += 1
        if seq.num_in_flight:
            before, after = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens + more
            seq.num_in_flight -= num_tokens + more
            seq.num_computed_tokens = after
            if after // page_size > before // page_size:  # a page is full
                kv.record(seq.page_table, seq.token_ids, after, seq.request.priority)
        if one.num_samples:
            if seq.wants_candidates:
                seq.candidates = _candidates_of_row(sampled, first_row)
            result.advanced.append(seq)
    return result


def _candidates_of_row(sampled: SampledTokens, row: int) -> Candidates:
    assert sampled.candidate_ids is not None
    assert sampled.candidate_logprobs is not None
    return Candidates(sampled.candidate_ids[row], sampled.candidate_logprobs[row])
