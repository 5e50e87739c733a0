"""Which ladders suit a workload: `suggest_buckets`, from what its steps held.

Called by `jaxserve buckets` over a schedule log, and by whoever has counted steps (a simulation). Pure:
what is proposed is used by giving it to `SchedulerConfig.token_buckets` and `row_buckets`.

A step of n tokens runs in the smallest rung that holds n, so a ladder wastes

    sum over steps of (rung(n) - n)

tokens of padding, and a rung more costs its programs at every first start. Where rungs stand between
two sizes that occur they can be lowered to the size below without any step noticing, so only sizes
that occur, and the limit, need be tried: the best k of them are found by dynamic programming over the
sizes, exactly.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from jaxserve.schedule.buckets import Buckets

MAX_SIZES = 1024  # distinct sizes that are told apart; the work grows with their square


def suggest_buckets(
    steps: Mapping[tuple[int, int], int],
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_token_rungs: int,
    num_row_rungs: int,
    rung_cost: float = 0.0,
) -> Buckets:
    """The ladders with the least padding for a workload.

    Args:
        steps: (tokens, rows that sample) of a step -> how many steps were like that. Steps without
            rows count for the tokens alone: they run no program of R.
        max_num_seqs, max_num_batched_tokens: the limits; each ladder ends with its own.
        num_token_rungs, num_row_rungs: most rungs of each ladder, the limit among them.
        rung_cost: padded tokens, or rows, over the whole workload that a further rung has to save.

    Raises:
        ValueError: no rung is allowed, or a step lies outside the limits.
    """
    tokens: Counter[int] = Counter()
    rows: Counter[int] = Counter()
    for (num_tokens, num_rows), count in steps.items():
        tokens[num_tokens] += count
        if num_rows:
            rows[num_rows] += count
    max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
    return Buckets.make(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        tokens=suggest_ladder(tokens, max_num_batched_tokens, num_token_rungs, rung_cost),
        rows=suggest_ladder(rows, max_num_seqs, num_row_rungs, rung_cost),
    )


def suggest_ladder(
    sizes: Mapping[int, int], limit: int, num_rungs: int, rung_cost: float = 0.0
) -> tuple[int, ...]:
    """The ladder of at most `num_rungs` rungs up to `limit` with the least padding.

    Args:
        sizes: size of a step -> how many steps had it. Beyond MAX_SIZES different ones, the nearest
            are rounded up to a common one first.
        limit: the last rung, whether it occurs or not.
        num_rungs: at least 1.
        rung_cost: padding that a rung has to save.

    Raises:
        ValueError: num_rungs below 1, or a size outside [1, limit].
    """
    if num_rungs < 1:
        raise ValueError(f"a ladder needs at least 1 rung, got {num_rungs}")
    for size in sizes:
        if not 1 <= size <= limit:
            raise ValueError(f"a step of size {size} lies outside [1, {limit}]")
    counts = _rounded(sizes, limit)
    ends = np.array(sorted({*counts, limit}))  # rungs that may be chosen; the last one always is
    num_steps = np.cumsum([counts.get(int(end), 0) for end in ends])
    # least[i]: padding of all steps up to ends[i] if the last of k rungs stands there. The ladder of
    # one rung pads everything to it; every further rung takes what lies above the rung below it.
    least = ends * num_steps
    below: list[np.ndarray] = []  # of each further rung: where the rung below it stands
    totals = [float(least[-1])]
    for k in range(1, min(num_rungs, len(ends))):
        grown, chosen = least.copy(), np.full(len(ends), -1)
        for i in range(k, len(ends)):
            rest = num_steps[i] - num_steps[k - 1 : i]  # steps that rung i takes, by the rung below
            paddings = least[k - 1 : i] + ends[i] * rest
            best = int(np.argmin(paddings))
            grown[i], chosen[i] = paddings[best], k - 1 + best
        least = grown
        below.append(chosen)
        totals.append(float(least[-1]) + k * rung_cost)
    rungs = [len(ends) - 1]
    for chosen in reversed(below[: int(np.argmin(totals))]):
        rungs.append(int(chosen[rungs[-1]]))
    return tuple(int(ends[i]) for i in reversed(rungs))


def padding_share(sizes: Mapping[int, int], rungs: Iterable[int]) -> float:
    """Padding / all that is computed for steps of these sizes on a ladder; 0.0 without steps."""
    ladder = np.array(sorted(rungs))
    steps = sorted(sizes.items())
    if not steps:
        return 0.0
    each, counts = np.array(steps).T
    computed = int(ladder[np.searchsorted(ladder, each)] @ counts)
    return 1 - int(each @ counts) / computed


def _rounded(sizes: Mapping[int, int], limit: int) -> Counter[int]:
    """At most MAX_SIZES sizes: beyond that each is rounded up to a multiple."""
    grain = 1
    while len({-(-size // grain) for size in sizes}) > MAX_SIZES:
        grain *= 2
    rounded: Counter[int] = Counter()
    for size, count in sizes.items():
        rounded[min(limit, -(-size // grain) * grain)] += count
    return rounded
