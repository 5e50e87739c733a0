"""The figures of a load, by the names and definitions of `vllm bench serve`.

Used by `jaxserve bench serve`, `capacity.py` and `scripts/gates`. Pure: records in, numbers out. A request
that failed has no latency and no tokens here; it is counted, by kind.

    TTFT  from sending a request to the first part of its output
    ITL   between two parts of one output, all outputs pooled
    TPOT  (E2EL - TTFT) / (output tokens - 1) of a request; an output of one token has none
    E2EL  from sending a request to the end of its output
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.server.load.records import RequestRecord

LATENCIES = ("ttft", "tpot", "itl", "e2el")
GOODPUT_LATENCIES = ("ttft", "tpot", "e2el")  # those that a request has one of
PERCENTILES = (50.0, 90.0, 99.0)


def load_figures(
    records: Sequence[RequestRecord],
    duration_s: float,
    *,
    percentiles: Sequence[float] = PERCENTILES,
    goodput_ms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """All figures of a load.

    Args:
        records: of all requests that were sent.
        duration_s: from the first request to the last answer; above 0.
        percentiles: which ones of each latency.
        goodput_ms: the most that each of GOODPUT_LATENCIES may be for a request to be a good one.

    Returns:
        Throughputs a second, latencies in milliseconds (None where no request has one), failures by kind.
    """
    good = [one for one in records if one.is_good]
    num_input = sum(one.num_prompt_tokens for one in good)
    num_output = sum(one.num_output_tokens for one in good)
    failures = Counter(one.failure or "empty" for one in records if not one.is_good)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(records) - len(good),
        "failures": dict(sorted(failures.items())),
        "total_input_tokens": num_input,
        "total_cached_tokens": sum(one.num_cached_tokens for one in good),
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        **peaks(good),
    }
    if goodput_ms:
        num_within = sum(is_within(one, goodput_ms) for one in good)
        figures["request_goodput"] = num_within / duration_s
        figures["goodput_share"] = num_within / len(records) if records else None
    for name, values in latencies_ms(good).items():
        figures |= summary(name, values, percentiles)
    return figures


def latencies_ms(good: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Every value of each latency, milliseconds.

    Args:
        good: requests that were answered to their end.
    """
    gaps = [
        later - earlier
        for one in good
        for earlier, later in zip(one.release_s, one.release_s[1:], strict=False)
    ]
    seconds = {
        "ttft": [one.ttft_s for one in good],
        "tpot": [one.tpot_s for one in good if one.tpot_s is not None],
        "itl": gaps,
        "e2el": [one.e2el_s for one in good],
    }
    return {name: [1e3 * value for value in values] for name, values in seconds.items()}


def summary(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, Any]:
    """mean_, median_, std_ and pXX_ of one latency."""
    kinds = ["mean", "median", "std", *(percentile_name(p) for p in percentiles)]
    if not values:
        return {f"{kind}_{name}_ms": None for kind in kinds}
    found = [
        np.mean(values),
        np.median(values),
        np.std(values),
        *np.percentile(values, percentiles),
    ]
    return {f"{kind}_{name}_ms": float(x) for kind, x in zip(kinds, found, strict=True)}


def percentile_name(percentile: float) -> str:
    """As "p99" or "p99.9"."""
    return f"p{percentile:g}"


def is_within(one: RequestRecord, limits_ms: Mapping[str, float]) -> bool:
    """Whether a good request meets every limit; an output of one token has a TPOT of 0 here."""
    found = {"ttft": one.ttft_s, "tpot": one.tpot_s or 0.0, "e2el": one.e2el_s}
    return all(1e3 * found[name] <= limit for name, limit in limits_ms.items())


def peaks(good: Sequence[RequestRecord]) -> dict[str, float]:
    """The most output tokens within one second, and the most requests.

    Seconds are counted from the first request on. A part of an output counts for as many tokens as the
    output has per part on average: servers put several in one where a client reads slowly.
    """
    if not good:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    begin = min(one.sent_s for one in good)
    num_seconds = math.ceil(max(one.sent_s + one.e2el_s for one in good) - begin) + 1
    tokens = np.zeros(num_seconds)
    requests = np.zeros(num_seconds, dtype=int)
    for one in good:
        seconds = (np.asarray(one.release_s) - begin).astype(int)
        np.add.at(tokens, seconds, one.num_output_tokens / len(one.release_s))
        requests[int(one.sent_s - begin) : int(one.sent_s + one.e2el_s - begin) + 1] += 1
    return {
        "max_output_tokens_per_s": float(tokens.max()),
        "max_concurrent_requests": int(requests.max()),
    }
