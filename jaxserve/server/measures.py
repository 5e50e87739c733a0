"""`Metrics`: what the server counts of generations and HTTP requests. Part of `ServerState`.

Fed in two places: `ServerState.generate` (every generation) and `HttpCounts` (every HTTP request). Told
by /metrics and the dashboard. Tokens and ends of requests are counted here, as they pass, so they are
there when the engine is not.

Invariants: counters only rise; a generation that the engine took is counted once in `requests` when it
ends, by stop, length, abort or error; a fault in here is logged and breaks nothing.
"""

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any

from jaxserve.errors import EngineDeadError, InvalidRequestError
from jaxserve.groups.group import NON_FINITE
from jaxserve.request import Request, RequestOutput, RequestTimes
from jaxserve.server import metric_tallies as tallies
from jaxserve.server.metric_tallies import Histogram, Recent

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_MOST_ASKED = 2**31 - 1

logger = logging.getLogger("jaxserve.server")


def harmless[Hook: Callable[..., None]](hook: Hook) -> Hook:
    """A hook whose faults are logged and reach nobody."""

    @functools.wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            hook(*args, **kwargs)
        except Exception:
            logger.exception("metrics: %s failed", hook.__qualname__)

    return guarded  # type: ignore[return-value]


class Metrics:
    """Everything that is counted on the HTTP side.

    Args:
        clock: seconds; the clock of `scope["state"]["arrived_s"]`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.recent = Recent()
        self.http_requests: Counter[tuple[str, str, str]] = Counter()  # handler, method, status
        self.requests: Counter[str] = Counter()  # by how they ended
        self.num_corrupted = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.ttft_s = Histogram(tallies.TTFT_S)
        self.itl_s = Histogram(tallies.ITL_S)
        self.tpot_s = Histogram(tallies.ITL_S)
        self.e2e_s = Histogram(tallies.LATENCY_S)
        self.queue_s = Histogram(tallies.LATENCY_S)
        self.prefill_s = Histogram(tallies.LATENCY_S)
        self.decode_s = Histogram(tallies.LATENCY_S)
        self.inference_s = Histogram(tallies.LATENCY_S)
        self.prompt_tokens = Histogram(tallies.TOKENS)
        self.output_tokens = Histogram(tallies.TOKENS)
        self.longest_output_tokens = Histogram(tallies.TOKENS)
        self.asked_choices = Histogram(tallies.CHOICES)
        self.asked_tokens = Histogram(tallies.TOKENS)

    def generation(self, request: Request, arrived_s: float) -> "Generation":
        """Watches one generation, in an `async with` around it.

        Args:
            request: what the engine is asked.
            arrived_s: when its HTTP request came.
        """
        return Generation(self, request, arrived_s)

    @harmless
    def http_request(self, handler: str, method: str, status: int) -> None:
        """An HTTP request was answered.

        Args:
            handler: path of its route, never a path that a client made up.
            method: as it came.
            status: of the reply.
        """
        known = method if method in METHODS else "OTHER"
        self.http_requests[handler, known, str(status)] += 1


class Generation:
    """What is measured of one generation; see `Metrics.generation`."""

    def __init__(self, metrics: Metrics, request: Request, arrived_s: float) -> None:
        self._metrics = metrics
        self._request = request
        self._arrived_s = arrived_s
        self._is_taken = False  # by the engine
        self._has_ended = False
        self._reasons: set[str] = set()  # of the choices that have ended
        self._num_tokens: dict[int, int] = {}  # by choice
        self._last_s: dict[int, float] = {}  # of each choice's last token

    async def __aenter__(self) -> "Generation":
        return self

    @harmless
    def output(self, output: RequestOutput) -> None:
        """The next part, before it is passed on."""
        metrics, now_s = self._metrics, self._metrics.clock()
        second = metrics.recent.at(now_s)
        self._count_prompt()
        for one in output.outputs:
            num_new = len(one.token_ids)
            if not num_new:
                continue
            last_s = self._last_s.get(one.index)
            if not self._last_s:
                ttft_s = now_s - self._arrived_s
                metrics.ttft_s.observe(ttft_s)
                second.num_first_tokens += 1
                second.ttft_s += ttft_s
                second.num_prompt_tokens += output.num_prompt_tokens
            elif last_s is not None:
                metrics.itl_s.observe((now_s - last_s) / num_new, num_new)
                second.num_gaps += num_new
                second.gaps_s += now_s - last_s
            self._last_s[one.index] = now_s
            self._num_tokens[one.index] = self._num_tokens.get(one.index, 0) + num_new
            metrics.num_output_tokens += num_new
            second.num_output_tokens += num_new
        for one in output.outputs:
            metrics.num_corrupted += one.stop_reason == NON_FINITE
            if one.finish_reason is not None:
                self._reasons.add(one.finish_reason)
        if output.finished:
            self._end(_reason(self._reasons))
            if not self._reasons & {"abort", "error"}:
                second.num_finished += 1
                self._measure(output, now_s)

    def _count_prompt(self) -> None:
        if not self._is_taken:
            self._is_taken = True
            self._metrics.num_prompt_tokens += len(self._request.prompt_token_ids)

    def _end(self, reason: str) -> None:
        self._has_ended = True
        self._metrics.requests[reason] += 1

    def _measure(self, output: RequestOutput, now_s: float) -> None:
        """The figures of a request that ended by itself."""
        metrics, params = self._metrics, self._request.sampling_params
        counts = self._num_tokens.values()
        longest = max(counts, default=0)
        metrics.e2e_s.observe(now_s - self._arrived_s)
        metrics.prompt_tokens.observe(output.num_prompt_tokens)
        metrics.output_tokens.observe(sum(counts))
        metrics.longest_output_tokens.observe(longest)
        metrics.asked_choices.observe(params.n)
        if params.max_tokens is not None:
            # A client may ask for more than any float can count.
            metrics.asked_tokens.observe(min(params.max_tokens, _MOST_ASKED))
        times = output.times
        if times is not None:
            self._measure_times(times, longest)

    def _measure_times(self, times: RequestTimes, longest: int) -> None:
        metrics = self._metrics
        arrival_s, scheduled_s, first_s, last_s = times
        if scheduled_s is None or first_s is None or last_s is None:
            return  # it asked for nothing that has to be computed
        metrics.queue_s.observe(scheduled_s - arrival_s)
        metrics.prefill_s.observe(first_s - scheduled_s)
        metrics.decode_s.observe(last_s - first_s)
        metrics.inference_s.observe(last_s - scheduled_s)
        if longest > 1:
            metrics.tpot_s.observe((last_s - first_s) / (longest - 1))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cut_short(error)

    @harmless
    def _cut_short(self, error: BaseException | None) -> None:
        """Counts what ends without its last output; what the engine did not take is no request."""
        is_refused = isinstance(error, InvalidRequestError)
        if self._has_ended or (is_refused and not self._is_taken):
            return
        self._count_prompt()
        self._end("error" if isinstance(error, EngineDeadError) else "abort")


def _reason(reasons: Collection[str]) -> str:
    """How a request ended whose choices ended so: what is worst counts."""
    return next((one for one in ("error", "abort", "length") if one in reasons), "stop")
