"""`Families`: what /metrics gives, made at each scrape from tallies and the engine's figures.

One table of names for ours and vLLM's. Invariant: everything has the label model_name and, as engine
counters only rise while the engine lives and are kept when it is gone, no counter ever falls.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jaxserve.server.measures import Metrics
from jaxserve.server.metric_tallies import Histogram
from jaxserve.stats import EngineStats

OURS, VLLM = "jaxserve:", "vllm:"

_HISTOGRAMS = (
    # field of Metrics, name, what it is, whether vLLM has it by this name
    ("ttft_s", "time_to_first_token_seconds", "From the arrival of a request to its first token"),
    ("itl_s", "inter_token_latency_seconds", "Between two tokens of an output"),
    (
        "tpot_s",
        "request_time_per_output_token_seconds",
        "Mean time between the tokens of a request's output, by the engine's clock",
    ),
    ("e2e_s", "e2e_request_latency_seconds", "From the arrival of a request to its end"),
    ("queue_s", "request_queue_time_seconds", "From the engine's queue to the first step"),
    ("prefill_s", "request_prefill_time_seconds", "From the first step to the first token"),
    ("decode_s", "request_decode_time_seconds", "From the first token to the last"),
    ("inference_s", "request_inference_time_seconds", "From the first step to the last token"),
    ("prompt_tokens", "request_prompt_tokens", "Tokens of a prompt"),
    ("output_tokens", "request_generation_tokens", "Tokens of all outputs of a request"),
    (
        "longest_output_tokens",
        "request_max_num_generation_tokens",
        "Tokens of the longest output of a request",
    ),
    ("asked_choices", "request_params_n", "Outputs asked for"),
    ("asked_tokens", "request_params_max_tokens", "max_tokens, where a request had it"),
)
# Field of EngineStats, name, what it is.
_ENGINE_COUNTERS = (
    ("num_queried_tokens", "prefix_cache_queries", "Tokens looked up in the prefix cache"),
    ("num_hit_tokens", "prefix_cache_hits", "Those of them that it had"),
    ("num_preemptions", "num_preemptions", "Sequences that had to give their pages up"),
)
_OUR_COUNTERS = (
    ("num_steps", "steps", "Steps of the engine"),
    ("num_scheduled_tokens", "scheduled_tokens", "Tokens computed"),
    ("num_padding_tokens", "padding_tokens", "Padding computed beside them"),
    ("num_swaps", "num_swaps", "Preempted sequences whose pages went to host RAM"),
    ("num_copied_pages", "copied_pages", "Pages copied because someone wrote into a shared one"),
)
_ROOFLINE_COUNTERS = (
    ("step_s", "step_seconds", "Seconds that steps took"),
    ("num_bytes", "step_bytes", "Bytes that steps had to move, on each device"),
    ("num_flops", "step_flops", "Operations that steps had to compute, on each device"),
    ("least_s", "step_roofline_seconds", "Seconds of the steps at the device's peak, if known"),
)
_OUR_GAUGES = (
    ("num_held", "num_sequences_held", "Sequences that neither run nor wait"),
    ("kv_utilisation", "kv_utilisation", "Tokens held per token slot of the pages in use"),
)


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """What one scrape tells.

    Args:
        metrics: the tallies.
        stats: the engine's figures, the last that are known; None = none yet.
        is_healthy: whether the engine serves: if not, its gauges are left out.
        num_refused: requests refused because the queue was full.
    """

    metrics: Metrics
    stats: EngineStats | None
    is_healthy: bool
    num_refused: int


class Families(Collector):
    """Makes the metric families of the scrape that was set last.

    Args:
        model_name: the label.
        with_vllm: also under vLLM's names.
    """

    def __init__(self, *, model_name: str, with_vllm: bool) -> None:
        self._labels = {"model_name": model_name}
        self._prefixes = (OURS, VLLM) if with_vllm else (OURS,)
        self.scrape: Scrape | None = None

    def collect(self) -> Iterator[Metric]:
        """Every family, ours first."""
        if self.scrape is None:
            return
        for prefix in self._prefixes:
            yield from self._both(prefix, self.scrape)
            if self.scrape.stats is not None:
                yield from self._of_engine(prefix, self.scrape.stats)
        yield from self._ours(self.scrape)
        if VLLM in self._prefixes:
            yield self._http("http_requests", self.scrape.metrics)

    def _both(self, prefix: str, scrape: Scrape) -> Iterator[Metric]:
        """What vLLM has too, from the tallies."""
        metrics = scrape.metrics
        yield self._gauge(prefix + "engine_healthy", "1 while the engine serves", scrape.is_healthy)
        yield self._counter(
            prefix + "prompt_tokens", "Tokens of the prompts taken", metrics.num_prompt_tokens
        )
        yield self._counter(
            prefix + "generation_tokens", "Tokens given out", metrics.num_output_tokens
        )
        yield self._counters(
            prefix + "request_success",
            "Requests that ended, by how",
            "finished_reason",
            {reason: metrics.requests[reason] for reason in ("stop", "length", "abort", "error")},
        )
        yield self._counter(
            prefix + "corrupted_requests",
            "Outputs that ended because the model computed no finite number",
            metrics.num_corrupted,
        )
        for field, name, text in _HISTOGRAMS:
            yield self._histogram(prefix + name, text, getattr(metrics, field))

    def _of_engine(self, prefix: str, stats: EngineStats) -> Iterator[Metric]:
        """What vLLM has too, from the engine."""
        for field, name, text in _ENGINE_COUNTERS:
            yield self._counter(prefix + name, text, getattr(stats, field))
        yield self._histogram(
            prefix + "iteration_tokens_total", "Tokens computed in a step", _by_step(stats)
        )
        config = {
            "block_size": str(stats.page_size),
            "num_gpu_blocks": str(stats.num_pages),
            "num_cpu_blocks": str(stats.num_host_pages),
            "cache_dtype": stats.kv_cache_dtype,
        }
        info = GaugeMetricFamily(
            prefix + "cache_config_info",
            "The page pool: tokens a page, pages, pages in host RAM, type",
            labels=[*self._labels, *config],
        )
        info.add_metric([*self._labels.values(), *config.values()], 1)
        yield info
        if self.scrape is None or not self.scrape.is_healthy:
            return
        yield self._gauge(prefix + "num_requests_running", "Sequences that run", stats.num_running)
        yield self._gauge(prefix + "num_requests_waiting", "Sequences that wait", stats.num_waiting)
        yield self._gauge(
            prefix + "kv_cache_usage_perc",
            "Share of the page pool that sequences own, 0 to 1",
            stats.num_owned_pages / max(1, stats.num_usable_pages),
        )

    def _ours(self, scrape: Scrape) -> Iterator[Metric]:
        """What only we have."""
        stats = scrape.stats
        yield self._http(OURS + "http_requests", scrape.metrics)
        yield self._counter(
            OURS + "requests_refused", "Requests that found the queue full", scrape.num_refused
        )
        if stats is None:
            return
        for field, name, text in _OUR_COUNTERS:
            yield self._counter(OURS + name, text, getattr(stats, field))
        if stats.roofline is not None:
            for field, name, text in _ROOFLINE_COUNTERS:
                yield self._counter(OURS + name, text, getattr(stats.roofline, field))
        if scrape.is_healthy:
            for field, name, text in _OUR_GAUGES:
                yield self._gauge(OURS + name, text, getattr(stats, field))
            pages = GaugeMetricFamily(
                OURS + "pages", "Pages of the pool", labels=[*self._labels, "state"]
            )
            for state in ("free", "cached", "owned"):
                count = getattr(stats, f"num_{state}_pages")
                pages.add_metric([*self._labels.values(), state], count)
            yield pages

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), float(value))
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._labels, label])
        for value, count in values.items():
            family.add_metric([*self._labels.values(), value], count)
        return family

    def _http(self, name: str, metrics: Metrics) -> Metric:
        family = CounterMetricFamily(
            name, "HTTP requests, by route", labels=["handler", "method", "status"]
        )
        for labels, count in sorted(metrics.http_requests.items()):
            family.add_metric(labels, count)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets, histogram.sum)
        return family


def _by_step(stats: EngineStats) -> Histogram:
    """Tokens by step: a step takes the smallest rung that holds its tokens, so counting by rung is exact."""
    histogram = Histogram([float(rung) for rung in sorted(stats.token_buckets)])
    histogram.counts = [*_steps_by_rung(stats), 0]
    histogram.sum = float(stats.num_scheduled_tokens)
    return histogram


def _steps_by_rung(stats: EngineStats) -> Iterable[int]:
    for rung in sorted(stats.token_buckets):
        use = stats.by_bucket.get(rung)
        yield 0 if use is None else use.num_steps
