"""When the requests of a load are due.

Used by `jaxserve bench serve` and `capacity.py`. Source: the arrivals of `vllm bench serve`: gaps of a
gamma distribution, scaled so that the last request is due when the rate says.
"""

import numpy as np


def arrival_times(
    rng: np.random.Generator, num_requests: int, request_rate: float, burstiness: float = 1.0
) -> np.ndarray:
    """Seconds at which requests are due, the first one at 0.

    Args:
        rng: where the draws come from.
        num_requests: how many, at least 1.
        request_rate: requests a second on average, above 0; inf: all at once.
        burstiness: shape of the gamma distribution of the gaps, above 0: 1 is a Poisson process, less is
            burstier, more is more regular, inf is a metronome.

    Returns:
        f64[num_requests], ascending; the last is exactly (num_requests - 1) / request_rate.
    """
    if np.isinf(request_rate) or num_requests == 1:
        return np.zeros(num_requests)
    num_gaps = num_requests - 1
    if np.isinf(burstiness):
        gaps = np.full(num_gaps, 1 / request_rate)
    else:
        gaps = rng.gamma(burstiness, 1 / (request_rate * burstiness), num_gaps)
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    span = num_gaps / request_rate
    # A burstiness near 0 can make all gaps 0: then there is nothing to scale.
    return times * (span / times[-1]) if times[-1] > 0 else np.linspace(0, span, num_requests)
