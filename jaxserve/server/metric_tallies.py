"""What metrics are counted in: `Histogram`, and `Recent`, the last minutes second by second.

Plain numbers, changed in the server's event loop alone: to count costs well under a microsecond, without
a lock. Read by `metric_families` at a scrape and by the dashboard.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

HISTORY_S = 180

# Seconds; those of vLLM, and some below them.
TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class Histogram:
    """Counts of values, by bucket.

    Args:
        bounds: upper bounds, each belongs to its bucket; ascending. There is one more bucket, for what
            is larger.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Counts a value, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self.counts)


@dataclass(slots=True)
class Second:
    """What happened in one second.

    Args:
        at_s: which, by the clock that `Recent` is told.
        num_prompt_tokens, num_output_tokens: of requests that got their first token, and all tokens out.
        num_finished: requests that ended by themselves.
        num_first_tokens, ttft_s: how many, and the sum of their times.
        num_gaps, gaps_s: between tokens: how many, and their sum.
    """

    at_s: int
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_first_tokens: int = 0
    ttft_s: float = 0.0
    num_gaps: int = 0
    gaps_s: float = 0.0


class Recent:
    """The last `HISTORY_S` seconds in which anything happened."""

    def __init__(self) -> None:
        self.seconds: deque[Second] = deque(maxlen=HISTORY_S)

    def at(self, now_s: float) -> Second:
        """The second that `now_s` falls into, to be added to."""
        at_s = int(now_s)
        if not self.seconds or self.seconds[-1].at_s != at_s:
            self.seconds.append(Second(at_s))
        return self.seconds[-1]
