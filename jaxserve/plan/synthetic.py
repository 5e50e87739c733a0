"""Workloads drawn from distributions, as traces: for figures that need one property at a time.

Used by `scripts/scheduling_figures` and tests. Every function takes a seeded generator, so a figure
names its workload by a seed. No two prompts share a token.
"""

from collections.abc import Sequence

import numpy as np

from jaxserve.plan.traces import Trace, TraceRequest


def exponential_lengths(
    rng: np.random.Generator, num_requests: int, mean: float, *, longest: int
) -> np.ndarray:
    """Lengths in tokens, exponentially distributed.

    Args:
        rng: where the draws come from.
        num_requests: how many.
        mean: of the distribution before rounding.
        longest: longer ones are cut to this.

    Returns:
        i64[num_requests], each in [1, longest].
    """
    return _whole(rng.exponential(mean, num_requests), longest)


def log_normal_lengths(
    rng: np.random.Generator, num_requests: int, mean: float, *, sigma: float, longest: int
) -> np.ndarray:
    """Lengths in tokens, log-normally distributed around `mean`.

    Args:
        rng: where the draws come from.
        num_requests: how many.
        mean: of the distribution before rounding: exp(mu + sigma**2 / 2).
        sigma: standard deviation of the logarithm.
        longest: longer ones are cut to this.

    Returns:
        i64[num_requests], each in [1, longest].
    """
    mu = np.log(mean) - sigma**2 / 2
    return _whole(rng.lognormal(mu, sigma, num_requests), longest)


def poisson_arrivals(
    rng: np.random.Generator, num_requests: int, requests_per_s: float
) -> np.ndarray:
    """Seconds at which requests arrive, the first at 0, independent of each other.

    Args:
        rng: where the draws come from.
        num_requests: how many.
        requests_per_s: mean rate.

    Returns:
        f64[num_requests], ascending.
    """
    gaps = rng.exponential(1 / requests_per_s, num_requests)
    gaps[0] = 0.0
    return np.cumsum(gaps)


def make_trace(
    name: str,
    *,
    prompt_lengths: Sequence[int] | np.ndarray,
    output_lengths: Sequence[int] | np.ndarray,
    arrivals_s: Sequence[float] | np.ndarray | None = None,
) -> Trace:
    """A trace from lengths and times.

    Args:
        name: for reports.
        prompt_lengths, output_lengths: tokens of each request.
        arrivals_s: when each arrives; None = all of them at 0. Requests are put in that order.
    """
    if arrivals_s is None:
        arrivals_s = np.zeros(len(prompt_lengths))
    order = np.argsort(arrivals_s, kind="stable")
    requests = tuple(
        TraceRequest(
            index=index,
            arrival_s=float(arrivals_s[i]),
            num_prompt_tokens=int(prompt_lengths[i]),
            num_output_tokens=int(output_lengths[i]),
        )
        for index, i in enumerate(order)
    )
    return Trace(name=name, requests=requests)


def _whole(lengths: np.ndarray, longest: int) -> np.ndarray:
    return np.clip(np.ceil(lengths), 1, longest).astype(np.int64)
