"""Every figure against arithmetic by hand, as `vllm bench serve` defines it."""

import math

import pytest

from jaxserve.server.load.figures import is_within, latencies_ms, load_figures, peaks, summary
from jaxserve.server.load.records import RequestRecord


def answered(sent: float, releases: list[float], ended: float, **fields: object) -> RequestRecord:
    record = RequestRecord(index=0, sent_s=sent, release_s=releases, ended_s=ended)
    record.num_prompt_tokens, record.num_output_tokens = 10, len(releases)
    for name, value in fields.items():
        setattr(record, name, value)
    return record


A = answered(0.0, [0.5, 1.0, 2.0], 2.5)  # ttft 500, gaps 500 1000, e2el 2500, tpot 2000 / 2
B = answered(1.0, [1.25, 1.5], 1.5, num_cached_tokens=4)  # ttft 250, gap 250, e2el 500, tpot 250
C = answered(2.0, [3.0], 3.0)  # ttft 1000, e2el 1000, no tpot
FAILED = RequestRecord(index=3, sent_s=0.5, failure="http_429")
HALF = RequestRecord(index=4, sent_s=0.5, release_s=[0.6], failure="cut", num_output_tokens=1)


def test_latencies():
    assert latencies_ms([A, B, C]) == {
        "ttft": [500, 250, 1000],
        "tpot": [1000, 250],
        "itl": [500, 1000, 250],
        "e2el": [2500, 500, 1000],
    }


def test_all_figures():
    found = load_figures(
        [A, FAILED, B, HALF, C],
        4.0,
        percentiles=(50, 100),
        goodput_ms={"ttft": 500, "tpot": 1000, "e2el": 2000},
    )
    assert found["duration"] == 4.0
    assert (found["completed"], found["failed"]) == (3, 2)
    assert found["failures"] == {"cut": 1, "http_429": 1}
    assert (found["total_input_tokens"], found["total_cached_tokens"]) == (30, 4)
    assert found["total_output_tokens"] == 6
    assert found["request_throughput"] == 0.75
    assert found["output_throughput"] == 1.5
    assert found["total_token_throughput"] == 9.0
    # A takes too long to its end, C to its first token; B is good.
    assert (found["request_goodput"], found["goodput_share"]) == (0.25, 0.2)
    assert found["mean_ttft_ms"] == pytest.approx(1750 / 3)
    assert (found["median_ttft_ms"], found["p50_ttft_ms"], found["p100_ttft_ms"]) == (500, 500, 1e3)
    variance = (500**2 + 250**2 + 1000**2) / 3 - (1750 / 3) ** 2
    assert found["std_ttft_ms"] == pytest.approx(math.sqrt(variance))
    assert (found["mean_tpot_ms"], found["median_itl_ms"]) == (625, 500)
    assert found["p100_e2el_ms"] == 2500


def test_percentiles_lie_between_values():
    found = summary("itl", [10.0, 20.0, 30.0, 40.0, 50.0], (25, 90, 99.5))
    assert found["p25_itl_ms"] == 20
    assert found["p90_itl_ms"] == pytest.approx(46)
    assert found["p99.5_itl_ms"] == pytest.approx(49.8)


def test_nothing_was_answered():
    found = load_figures([FAILED, HALF], 2.0, goodput_ms={"ttft": 1})
    assert (found["completed"], found["request_throughput"], found["goodput_share"]) == (0, 0, 0)
    assert found["p99_ttft_ms"] is None
    assert found["max_concurrent_requests"] == 0


def test_peaks():
    # The four seconds see 1, 1 + 2, 1 and 1 parts.
    assert peaks([A, B, C]) == {"max_output_tokens_per_s": 3.0, "max_concurrent_requests": 2}
    several = answered(0.0, [0.1, 0.2], 0.2, num_output_tokens=8)
    assert peaks([several])["max_output_tokens_per_s"] == 8.0


def test_one_token_keeps_every_tpot_limit():
    assert is_within(C, {"tpot": 0.001})
    assert is_within(C, {"ttft": 1000})
    assert not is_within(C, {"ttft": 999.9})
