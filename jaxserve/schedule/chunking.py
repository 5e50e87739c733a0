"""How many tokens of a step go to whom: decode tokens, and chunks of prompts. Used by the scheduler.

Every running sequence gets at least one token in every step; the rest of the budget goes to those
that have more to compute. Source: SARATHI (Agrawal et al., 2023), stall-free batching.
"""

import math
from collections.abc import Sequence as Several

from jaxserve.schedule.buckets import Buckets
from jaxserve.schedule.plan import StepPlan
from jaxserve.schedule.queue import WaitingQueue

SMOOTHING = 0.3  # weight of the newest measurement
FORGETTING = 0.995  # what is left, after another step, of the time of a step that was too slow


def share_in_order(
    remaining: Several[int], budget: int, *, long_prompt: int, threshold: int, others_wait: bool
) -> list[int]:
    """Chunks of prompts in the middle of their computation, the first first.

    Args:
        remaining: tokens left of each, at least 1.
        budget: tokens to share out, at least one for each prompt.
        long_prompt: a prompt with more tokens left than this is long.
        threshold: most tokens of a long one while it is not alone.
        others_wait: whether somebody waits for admission.

    Returns:
        Tokens for each, at least 1; they sum to at most `budget`.
    """
    alone = len(remaining) == 1 and not others_wait
    left = budget - len(remaining)  # one each is theirs already
    chunks = []
    for tokens in remaining:
        most = tokens if alone or tokens <= long_prompt else min(tokens, threshold)
        extra = max(0, min(most - 1, left))
        left -= extra
        chunks.append(1 + extra)
    return chunks


def share_short_first(
    remaining: Several[int], budget: int, *, shortest_waiting: int | None, reserve: int
) -> list[int]:
    """Chunks of prompts in the middle of their computation, the shortest rest first.

    The first of them, the oldest, has `reserve` tokens whatever the others need. Those with more
    left than the shortest of the waiting leave the rest of the budget to it.

    Args:
        remaining: tokens left of each, at least 1, the oldest prompt first.
        budget: tokens to share out, at least one for each prompt.
        shortest_waiting: tokens of the shortest prompt that waits; None = nobody waits.
        reserve: tokens that the oldest gets at least, if it has so many left.

    Returns:
        Tokens for each, at least 1; they sum to at most `budget`.
    """
    chunks = [1] * len(remaining)
    left = budget - len(remaining)
    if remaining:
        extra = max(0, min(remaining[0], reserve, left + 1) - 1)
        chunks[0] += extra
        left -= extra
    for index in sorted(range(len(remaining)), key=lambda i: remaining[i]):
        if shortest_waiting is not None and remaining[index] > shortest_waiting:
            break
        extra = min(remaining[index] - chunks[index], left)
        chunks[index] += extra
        left -= extra
    return chunks


class StepTimer:
    """Learns how long a step of each rung takes, to keep steps below a target.

    Args:
        buckets: gives the rungs of T.
    """

    def __init__(self, buckets: Buckets):
        self._rungs = buckets.tokens
        self._seconds: dict[int, float] = {}  # by rung, smoothed

    def observe(self, rung: int, seconds: float) -> None:
        """Takes in how long a step of `rung` tokens took."""
        known = self._seconds.get(rung, seconds)
        self._seconds[rung] = known + SMOOTHING * (seconds - known)

    def budget(self, target_s: float) -> int:
        """The largest rung whose step is known to take no longer than `target_s`, or the one above
        it as long as that was never seen; the smallest if none is known to be fast enough. A rung
        that was too slow is tried again after a while.
        """
        fast = [self._seconds.get(rung, math.inf) <= target_s for rung in self._rungs]
        if not any(fast):
            return self._rungs[0]
        best = max(index for index, is_fast in enumerate(fast) if is_fast)
        if best + 1 == len(self._rungs):
            return self._rungs[best]
        above = self._rungs[best + 1]
        if above not in self._seconds:
            return above
        self._seconds[above] *= FORGETTING
        if self._seconds[above] <= target_s:
            del self._seconds[above]
        return self._rungs[best]


class ChunkSizes:
    """Shares the token budget of a step out among the running sequences.

    Args:
        buckets: gives max_num_batched_tokens and the rungs.
        short_first: prompts with little left come first, and newcomers before long prompts; else
            prompts are served in the order of `running`.
        max_num_partial_prefills: most prompts in the middle of their chunks at once.
        long_prefill_token_threshold: most tokens of a chunk of a prompt that needs more than one
            whole step, while others wait for a part of it.
        target_itl_s: seconds that a step with decode tokens in it should not exceed; None = any.
    """

    def __init__(
        self,
        buckets: Buckets,
        *,
        short_first: bool,
        max_num_partial_prefills: int,
        long_prefill_token_threshold: int,
        target_itl_s: float | None,
    ):
        self.max_num_partial_prefills = max_num_partial_prefills
        self._budget = buckets.max_num_batched_tokens
        self._short_first = short_first
        self._threshold = long_prefill_token_threshold
        self._target_itl_s = target_itl_s
        self._timer = StepTimer(buckets)

    def share(self, to_compute: list[int], waiting: WaitingQueue) -> tuple[list[int], int]:
        """Tokens of the next step for each running sequence, at least 1, and what is left.

        Args:
            to_compute: known tokens that each of them has not computed.
            waiting: who else would have a part.
        """
        shares = [1] * len(to_compute)
        partial = [index for index, tokens in enumerate(to_compute) if tokens > 1]
        num_decoding = len(to_compute) - len(partial)
        budget = self._step_budget(num_decoding, len(to_compute)) - num_decoding
        if not partial:
            return shares, budget
        remaining = [to_compute[i] for i in partial]
        if self._short_first:
            shortest = min((len(seq.token_ids) for seq in waiting.head()), default=None)
            reserve = max(1, budget // 4)
            chunks = share_short_first(
                remaining, budget, shortest_waiting=shortest, reserve=reserve
            )
        else:
            chunks = share_in_order(
                remaining,
                budget,
                long_prompt=self._budget,
                threshold=self._threshold,
                others_wait=bool(waiting),
            )
        for index, tokens in zip(partial, chunks, strict=True):
            shares[index] = tokens
        return shares, budget - sum(chunks)

    def first_chunk(self, num_tokens: int, budget: int, *, alone: bool) -> int:
        """The most tokens that a newcomer may begin with.

        Args:
            num_tokens: that it has to compute.
            budget: what is left of the step.
            alone: nobody else has a prompt to compute.
        """
        if self._short_first or alone or num_tokens <= self._budget:
            return budget
        return min(budget, self._threshold)

    def _step_budget(self, num_decoding: int, num_running: int) -> int:
        """The token budget; smaller while decoding sequences have a target to meet, but never so
        small that a running sequence gets nothing or nobody new can begin.
        """
        if self._target_itl_s is None or not num_decoding:
            return self._budget
        wanted = max(self._timer.budget(self._target_itl_s), num_running + 1)
        return min(self._budget, wanted)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learns from how long a step took."""
        self._timer.observe(plan.bucket.num_tokens, seconds)
