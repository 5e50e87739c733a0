"""The highest request rate at which a server keeps its promises, found by probing.

Used by `jaxserve bench capacity`. `find_capacity` is pure: it is given a function that measures one rate, and
is tested on a simulated queue. Source: the capacity search of SARATHI-Serve (section 5, "capacity"):
double the rate until a promise is broken, then bisect.

    rates   --- passed ---[low]======= searched =======[high]--- failed ---
    ends when high / low <= 1 + tolerance

Invariant: `low` is the highest rate that passed below the lowest that failed; no rate is probed twice.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.server.load.figures import LATENCIES, latencies_ms
from jaxserve.server.load.records import RequestRecord
from jaxserve.server.load.run_load import LoadResult

MAX_LATENESS_MS = 100.0  # of this client, p99: beyond that it measures itself
_STATISTIC = re.compile(r"(mean|median|p\d{1,2}(?:\.\d+)?|p100)_([a-z0-9]+)(?:_ms)?")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One promise: a statistic of a latency, and the most that it may be.

    Args:
        statistic: "mean", "median" or a percentile such as "p99".
        latency: one of LATENCIES.
        limit_ms: milliseconds.
    """

    statistic: str
    latency: str
    limit_ms: float

    @classmethod
    def parse(cls, text: str) -> "Objective":
        """Reads "p99_ttft:500".

        Raises:
            ValueError: it is no promise.
        """
        name, _, limit = text.partition(":")
        found = _STATISTIC.fullmatch(name.strip())
        if not found or found[2] not in LATENCIES:
            raise ValueError(
                f"must name mean, median or a percentile of {', '.join(LATENCIES)} and its limit in "
                f"milliseconds, as in p99_ttft:500, got {text!r}"
            )
        limit_ms = positive_number(limit, text)
        return cls(statistic=found[1], latency=found[2], limit_ms=limit_ms)

    @property
    def name(self) -> str:
        """As it is called in the figures: "p99_ttft_ms"."""
        return f"{self.statistic}_{self.latency}_ms"

    def value_ms(self, good: Sequence[RequestRecord]) -> float | None:
        """What was measured; None where no request has the latency."""
        values = latencies_ms(good)[self.latency]
        if not values:
            return None
        if self.statistic == "mean":
            return float(np.mean(values))
        percentile = 50.0 if self.statistic == "median" else float(self.statistic[1:])
        return float(np.percentile(values, percentile))


def positive_number(text: str, whole: str) -> float:
    """A number above 0; `whole` is what the message shows."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"must end with a number of milliseconds above 0, got {whole!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One rate that was measured.

    Args:
        request_rate: requests a second.
        broken: what did not hold, in words; empty: it passed.
        figures: of the measurement.
    """

    request_rate: float
    broken: Sequence[str]
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every promise was kept."""
        return not self.broken


def judge(
    result: LoadResult,
    objectives: Sequence[Objective],
    *,
    warmup_s: float = 0.0,
    max_failed_share: float = 0.0,
) -> list[str]:
    """What did not hold in a measurement.

    Promises must hold for the requests due after the warm-up, and for the later half of them alone: where
    a queue grows, the later ones wait longer, and a probe that ran longer would have failed.

    Args:
        result: the measurement.
        objectives: the promises.
        warmup_s: requests due before are not judged.
        max_failed_share: how many of those judged may have no answer.
    """
    judged = [one for one in result.records if one.due_s >= warmup_s]
    if not judged:
        return ["no request was due after the warm-up"]
    broken = []
    late_ms = 1e3 * float(np.percentile(result.lateness_s, 99))
    if late_ms > MAX_LATENESS_MS:
        broken.append(
            f"this client sent its requests {late_ms:.3g} ms late (p99): it cannot send as many"
        )
    num_missing = sum(not one.is_good for one in judged) + result.num_not_sent
    if num_missing > max_failed_share * (len(judged) + result.num_not_sent):
        broken.append(
            f"{num_missing} of {len(judged) + result.num_not_sent} requests have no answer"
        )
    middle = judged[len(judged) // 2].due_s
    parts = {"": judged, " of the later half": [one for one in judged if one.due_s >= middle]}
    for objective in objectives:
        for where, records in parts.items():
            value = objective.value_ms([one for one in records if one.is_good])
            if value is not None and value > objective.limit_ms:
                limit = f"more than {objective.limit_ms:g}"
                broken.append(f"{objective.name}{where} is {value:.6g}, {limit}")
                break
    return broken


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """How a search goes and when it ends.

    Args:
        start_rate: the first rate, requests a second.
        min_rate: no rate below is probed.
        max_rate: no rate above is probed.
        growth: what a rate is multiplied with while nothing fails, and divided by while nothing passes.
        tolerance: ends when the lowest rate that failed is at most this share above the best that passed.
        max_probes: ends after so many.
    """

    start_rate: float = 1.0
    min_rate: float = 0.05
    max_rate: float = 10_000.0
    growth: float = 2.0
    tolerance: float = 0.05
    max_probes: int = 20


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The result of a search.

    Args:
        request_rate: the highest rate that passed below every one that failed; None: none passed.
        failed_rate: the lowest rate that failed; None: none failed.
        probes: all of them, in order.
        ended_by: "tolerance", "max_probes", "max_rate" (the highest rate passed), "min_rate" (the lowest
            failed) or "stopped".
    """

    request_rate: float | None
    failed_rate: float | None
    probes: Sequence[Probe]
    ended_by: str


def find_capacity(
    measure: Callable[[float], Probe | None],
    limits: SearchLimits,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Capacity:
    """Searches.

    Args:
        measure: probes one rate; None: it was stopped meanwhile.
        limits: how.
        is_stopped: asked before each probe whether to end with what is known.
    """
    probes: list[Probe] = []
    low: float | None = None
    high: float | None = None
    rate: float = min(max(limits.start_rate, limits.min_rate), limits.max_rate)
    while True:
        if len(probes) >= limits.max_probes:
            ended_by = "max_probes"
            break
        probe = None if is_stopped() else measure(rate)
        if probe is None:
            ended_by = "stopped"
            break
        probes.append(probe)
        if probe.passed:
            low = rate
        else:
            high = rate
        following = _next_rate(low, high, limits)
        if isinstance(following, str):
            ended_by = following
            break
        rate = following
    return Capacity(request_rate=low, failed_rate=high, probes=probes, ended_by=ended_by)


def _next_rate(low: float | None, high: float | None, limits: SearchLimits) -> float | str:
    """The rate to probe next, or why there is none."""
    if high is None:
        assert low is not None
        return "max_rate" if low >= limits.max_rate else min(low * limits.growth, limits.max_rate)
    if low is None:
        lowest = high <= limits.min_rate
        return "min_rate" if lowest else max(high / limits.growth, limits.min_rate)
    if high <= low * (1 + limits.tolerance):
        return "tolerance"
    return math.sqrt(low * high)  # in the middle of their ratio, as the tolerance is one
