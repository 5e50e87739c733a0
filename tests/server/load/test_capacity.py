"""The search finds the capacity of a queue whose capacity is known, and stops when it is told to."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.server.load.capacity import (
    Capacity,
    Objective,
    Probe,
    SearchLimits,
    find_capacity,
    judge,
)
from jaxserve.server.load.records import RequestRecord
from jaxserve.server.load.run_load import CUT_OFF
from tests.server.load.queue_model import Queue

TTFT = Objective(statistic="p99", latency="ttft", limit_ms=200.0)


def threshold(limit: float):
    """A server that holds up to a rate, and notes what it was asked."""
    asked: list[float] = []

    def measure(rate: float) -> Probe:
        asked.append(rate)
        return Probe(request_rate=rate, broken=[] if rate <= limit else ["too fast"])

    return measure, asked


@given(st.floats(0.06, 5000), st.floats(0.1, 100), st.floats(0.01, 0.5))
def test_every_threshold_is_found_within_the_tolerance(limit, start, tolerance):
    measure, asked = threshold(limit)
    limits = SearchLimits(start_rate=start, tolerance=tolerance, max_probes=60)
    found = find_capacity(measure, limits)
    assert found.ended_by == "tolerance"
    assert found.request_rate is not None
    assert found.failed_rate is not None
    assert found.request_rate <= limit < found.failed_rate
    assert found.failed_rate <= found.request_rate * (1 + tolerance)
    assert len(asked) == len(set(asked)) == len(found.probes)


def test_the_rates_double_then_halve_the_gap():
    measure, asked = threshold(5)
    find_capacity(measure, SearchLimits(start_rate=1, tolerance=0.5))
    assert asked == [1, 2, 4, 8, pytest.approx(32**0.5)]
    measure, asked = threshold(1)
    found = find_capacity(measure, SearchLimits(start_rate=6, growth=3, tolerance=2.5))
    assert asked == [6, 2, pytest.approx(2 / 3)]
    assert found.request_rate == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("limit", "limits", "ended_by", "rate", "failed"),
    [
        (1e9, {"max_rate": 50.0}, "max_rate", 50.0, None),
        (0.0, {"min_rate": 0.3}, "min_rate", None, 0.3),
        (5.0, {"max_probes": 3}, "max_probes", 4.0, None),
        (5.0, {"max_probes": 4}, "max_probes", 4.0, 8.0),
        (5.0, {"start_rate": 100.0, "max_rate": 4.0}, "max_rate", 4.0, None),
    ],
)
def test_it_stops_where_it_is_told_to(limit, limits, ended_by, rate, failed):
    found = find_capacity(threshold(limit)[0], SearchLimits(**limits))
    assert (found.ended_by, found.request_rate, found.failed_rate) == (ended_by, rate, failed)


def test_it_can_be_stopped():
    measure, asked = threshold(100)
    found = find_capacity(measure, SearchLimits(), is_stopped=lambda: len(asked) == 3)
    assert (found.ended_by, found.request_rate, len(found.probes)) == ("stopped", 4.0, 3)
    never = find_capacity(lambda rate: None, SearchLimits())
    assert never == Capacity(request_rate=None, failed_rate=None, probes=[], ended_by="stopped")


@pytest.mark.parametrize(
    ("queue", "limit_ms"),
    [
        (Queue(), 200.0),
        (Queue(service_s=0.25, num_servers=1), 5000.0),
        (Queue(prefill_s=0.4), 450.0),
    ],
)
def test_the_capacity_of_a_queue(queue, limit_ms):
    """The search agrees with a sweep of rates, and both with the rate at which the queue begins to grow:
    a longer probe comes nearer to it from above, since the queue has more time to grow.
    """
    objective = [dataclasses.replace(TTFT, limit_ms=limit_ms)]
    stable = queue.num_servers / queue.service_s
    found = find_capacity(
        lambda rate: queue.probe(rate, objective, 600.0), SearchLimits(tolerance=0.02)
    )
    assert found.request_rate is not None
    assert stable * 0.98 <= found.request_rate <= stable * 1.03
    sweep = [0.01 * i * stable for i in range(50, 150)]
    best = max(rate for rate in sweep if queue.probe(rate, objective, 600.0).passed)
    assert found.request_rate == pytest.approx(best, rel=0.03)


def test_a_promise_that_even_an_idle_server_breaks():
    found = find_capacity(
        lambda rate: Queue(prefill_s=0.3).probe(rate, [TTFT]), SearchLimits(min_rate=0.2)
    )
    assert (found.request_rate, found.ended_by) == (None, "min_rate")


def test_a_queue_that_begins_to_grow_fails_in_its_later_half():
    """Overload shows late: the median of all is still good, that of the later half is not."""
    median = Objective(statistic="median", latency="ttft", limit_ms=1500.0)
    long = Queue().serve(9.0, 270)  # 8 a second are served: waits grow to 3.75 s
    half = [one for one in long.records if one.due_s >= 15]
    value, later = median.value_ms(long.records), median.value_ms(half)
    assert value is not None
    assert later is not None
    assert value < 2000 < later
    (broken,) = judge(long, [dataclasses.replace(median, limit_ms=2000.0)])
    assert broken.startswith("median_ttft_ms of the later half is 2")
    assert judge(long, [dataclasses.replace(median, limit_ms=9000.0)]) == []


def test_the_warm_up_is_not_judged_and_failures_are():
    result = Queue(service_s=0.1).serve(10.0, 100)
    slow: RequestRecord = result.records[2]
    slow.release_s = [slow.sent_s + 5, slow.sent_s + 5.1]
    strict = [dataclasses.replace(TTFT, statistic="p100")]
    assert judge(result, strict)
    assert judge(result, strict, warmup_s=1.0) == []
    result.records[50].failure = CUT_OFF
    assert judge(result, [], warmup_s=1.0) == ["1 of 90 requests have no answer"]
    assert judge(result, [], warmup_s=1.0, max_failed_share=0.02) == []
    assert judge(result, [], warmup_s=99.0) == ["no request was due after the warm-up"]
    unsent = dataclasses.replace(result, num_not_sent=10)
    assert judge(unsent, []) == ["11 of 110 requests have no answer"]


def test_a_client_that_is_late_measures_itself():
    result = dataclasses.replace(Queue().serve(1.0, 50), lateness_s=[0.3] * 50)
    (broken,) = judge(result, [])
    assert broken.startswith("this client sent its requests 300 ms late")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("p99_ttft:500", "p99_ttft_ms"),
        ("median_itl_ms:20", "median_itl_ms"),
        (" mean_tpot:0.5", "mean_tpot_ms"),
        ("p99.9_e2el:1e3", "p99.9_e2el_ms"),
        ("p100_ttft:1", "p100_ttft_ms"),
    ],
)
def test_objectives(text, name):
    assert Objective.parse(text).name == name


@pytest.mark.parametrize(
    "text",
    ["", "ttft:5", "p99_ttft", "p99_ttft:x", "p99_ttft:0", "p99_ttft:inf", "p101_ttft:1", "p9_x:1"],
)
def test_what_is_no_objective(text):
    with pytest.raises(ValueError, match="must"):
        Objective.parse(text)
