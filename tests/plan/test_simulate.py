"""The simulator: its clock by hand, its counts against independent ones, and that nothing is lost."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.errors import ConfigError
from jaxserve.plan.chips import CHIPS
from jaxserve.plan.models import MODELS
from jaxserve.plan.roofline import Roofline
from jaxserve.plan.simulate import (
    SimulationConfig,
    SimulationError,
    Simulator,
    percentiles,
    simulate,
)
from jaxserve.plan.simulate.report import num_block_hits
from jaxserve.plan.synthetic import make_trace
from jaxserve.plan.traces import Trace, TraceRequest, read_trace
from scripts.scheduling.block_lru import hit_rate

DATA = Path(__file__).parent / "data"
LLAMA, H100 = MODELS["llama-3-8b"], CHIPS["h100"]
ROOFLINE = Roofline(LLAMA, H100)
TRACES = ("mooncake_conversation.jsonl", "mooncake_synthetic.jsonl")


def arm(*, cache: dict | None = None, scheduler: dict | None = None, **changes) -> SimulationConfig:
    """A config of one H100 with Llama-3-8B, changed."""
    return SimulationConfig(
        model=LLAMA,
        chip=H100,
        cache=CacheConfig(**(cache or {})),
        scheduler=SchedulerConfig(
            **{"max_num_seqs": 64, "max_num_batched_tokens": 2048, **(scheduler or {})}
        ),
        **changes,
    )


def uniform(num_requests: int, prompt: int, output: int, *, every_s: float = 0.0) -> Trace:
    """Requests of one length at even distances."""
    return make_trace(
        "uniform",
        prompt_lengths=[prompt] * num_requests,
        output_lengths=[output] * num_requests,
        arrivals_s=np.arange(num_requests) * every_s,
    )


def measured(result) -> dict:
    """What must be equal in two equal runs."""
    return {key: value for key, value in result.to_json().items() if key != "wall_s"}


# The clock


def test_one_request_takes_the_time_of_its_steps():
    result = simulate(arm(), uniform(1, 100, 3))
    steps = [ROOFLINE.slice_s(0, 100), ROOFLINE.slice_s(100, 1), ROOFLINE.slice_s(101, 1)]
    assert list(result.measures.ttft_s) == [steps[0]]
    assert list(result.measures.itl_s) == pytest.approx(steps[1:])
    assert list(result.measures.e2el_s) == [sum(steps)]
    assert result.measures.num_steps == 3
    assert result.output_tokens_per_s == pytest.approx(3 / sum(steps))


def test_a_long_prompt_is_computed_in_chunks_or_whole():
    trace = uniform(1, 5000, 1)
    chunks = simulate(arm(), trace).measures
    bounds = [(0, 2048), (2048, 2048), (4096, 904)]
    expected = [ROOFLINE.slice_s(*bound) for bound in bounds]
    # a chunk that does not reach the prompt's end samples nothing, and so leaves the head alone
    head = ROOFLINE.slice_s(0, 2048) - ROOFLINE.step_s(
        num_tokens=2048, num_logit_rows=0, num_context_tokens=2048, num_pairs=2048 * 2049 // 2
    )
    assert chunks.num_steps == 3
    assert chunks.ttft_s[0] == pytest.approx(sum(expected) - 2 * head)
    whole = simulate(arm(chunked_prefill=False), trace).measures
    assert whole.num_steps == 1
    assert whole.ttft_s[0] == pytest.approx(ROOFLINE.slice_s(0, 5000))


def test_whole_prompts_are_never_cut_whoever_runs_beside_them():
    trace = make_trace("t", prompt_lengths=[50] * 20 + [6000] * 5, output_lengths=[40] * 25)
    simulator = Simulator(arm(chunked_prefill=False, unlimited_pages=True), trace)
    update, sizes = simulator.scheduler.update, []

    def watch(plan, sampled):
        sizes.extend(one.num_tokens for one in plan.slices)
        return update(plan, sampled)

    simulator.scheduler.update = watch
    simulator.run()
    assert set(sizes) == {1, 50, 6000}


def test_the_clock_waits_for_arrivals():
    result = simulate(arm(), uniform(3, 10, 1, every_s=2.0))
    assert result.measures.end_s == pytest.approx(4.0 + ROOFLINE.slice_s(0, 10))
    assert result.measures.busy_s == pytest.approx(3 * ROOFLINE.slice_s(0, 10))
    twice = simulate(arm(rate_scale=2.0), uniform(3, 10, 1, every_s=2.0))
    assert twice.measures.end_s == pytest.approx(2.0 + ROOFLINE.slice_s(0, 10))


def test_utilisation_of_one_request_by_hand():
    """30 tokens in 2 pages of 16, then 31, 32, and 33 tokens in 3."""
    measures = simulate(arm(), uniform(1, 30, 4)).measures
    seconds = [ROOFLINE.slice_s(0, 30), *(ROOFLINE.slice_s(n, 1) for n in (30, 31, 32))]
    held = [n * s for n, s in zip((30, 31, 32, 33), seconds, strict=True)]
    owned = [n * s for n, s in zip((32, 32, 32, 48), seconds, strict=True)]
    assert measures.held_token_s == pytest.approx(sum(held))
    assert measures.owned_slot_s == pytest.approx(sum(owned))


def test_shared_pages_count_once_in_the_utilisation():
    blocks = np.array([0], np.int32)
    requests = tuple(
        TraceRequest(
            index=i, arrival_s=float(i), num_prompt_tokens=500, num_output_tokens=400, blocks=blocks
        )
        for i in range(2)
    )
    simulator = Simulator(arm(), Trace(name="two", requests=requests))
    kv = simulator.scheduler.kv
    owned = []
    update = simulator.scheduler.update

    def watch(plan, sampled):
        owned.append((len(plan.slices), kv.num_owned_pages))
        return update(plan, sampled)

    simulator.scheduler.update = watch
    simulator.run()
    # 900 tokens take 57 pages, 31 of them the prompt's full ones
    assert max(pages for running, pages in owned if running == 2) <= 57 + 57 - 31
    assert 0.97 < simulator.measures.held_token_s / simulator.measures.owned_slot_s <= 1.0


# Block hits


@pytest.mark.parametrize("page_size", [16, 512])
@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("capacity", [None, 300, 1500])
def test_sequential_hits_are_those_of_an_lru_list_of_blocks(name, page_size, capacity):
    trace = read_trace(DATA / name, "mooncake", max_requests=150)
    num_pages = None if capacity is None else 1 + capacity * 512 // page_size
    config = arm(
        cache={"page_size": page_size, "num_pages": num_pages},
        unlimited_pages=capacity is None,
        arrivals="sequential",
    )
    expected = hit_rate([r.blocks.tolist() for r in trace.requests], capacity)
    assert simulate(config, trace).block_hit_rate == pytest.approx(expected, abs=1e-12)
    assert expected > 0.02


def test_other_evictions_are_no_lru_list():
    """The control of the test above."""
    trace = read_trace(DATA / TRACES[1], "mooncake", max_requests=150)
    expected = hit_rate([r.blocks.tolist() for r in trace.requests], 1500)
    cache = {"page_size": 512, "num_pages": 1501, "eviction": "lfu"}
    found = simulate(arm(cache=cache, arrivals="sequential"), trace).block_hit_rate
    assert found is not None
    assert abs(found - expected) > 0.001


@pytest.mark.parametrize(
    ("num_cached", "num_prompt", "page_size", "hits"),
    [
        (0, 1024, 16, 0),
        (511, 512, 16, 1),  # all of it: one token is computed again
        (512, 1024, 16, 1),
        (1008, 1024, 16, 1),  # the last page is missing
        (1023, 1024, 16, 2),
        (1023, 1024, 512, 2),
        (608, 620, 16, 2),  # up to the last full page
        (592, 620, 16, 1),
        (512, 520, 16, 1),  # the second block has no full page
        (512, 620, 512, 1),
        (511, 620, 512, 1),
    ],
)
def test_which_blocks_count(num_cached, num_prompt, page_size, hits):
    assert num_block_hits(num_cached, num_prompt, page_size) == hits


def test_what_was_generated_is_found_by_nobody():
    """Two equal prompts, one after the other: the second finds the prompt and nothing else."""
    blocks = np.array([0, 1], np.int32)
    requests = tuple(
        TraceRequest(
            index=i,
            arrival_s=100.0 * i,
            num_prompt_tokens=1024,
            num_output_tokens=100,
            blocks=blocks,
        )
        for i in range(2)
    )
    measures = simulate(arm(), Trace(name="two", requests=requests)).measures
    assert measures.num_cached_tokens == 1023
    assert (measures.num_blocks, measures.num_block_hits) == (4, 2)
    assert measures.num_computed_tokens == 2 * 1123 - 1023


def test_a_trace_without_blocks_has_no_block_hit_rate():
    result = simulate(arm(), uniform(2, 100, 2))
    assert result.block_hit_rate is None
    assert result.token_hit_rate == 0.0


# Nothing is lost

ARMS = {
    "plain": {},
    "no cache": {"cache": {"enable_prefix_caching": False}},
    "tight": {"cache": {"num_pages": 280}},
    "tight swap": {
        "cache": {"num_pages": 280, "host_kv_gib": 200.0},
        "scheduler": {"preemption_mode": "swap"},
    },
    "tight auto": {"cache": {"num_pages": 280, "host_kv_gib": 20.0}},
    "static": {"scheduler": {"scheduling": "static", "max_num_seqs": 8}},
    "whole": {"chunked_prefill": False},
    "lpm": {"scheduler": {"admission": "lpm"}},
    "priority": {"scheduler": {"admission": "priority"}},
    "short_first": {"scheduler": {"admission": "short_first"}},
    "tight lfu": {"cache": {"num_pages": 280, "eviction": "lfu"}},
    "target": {"scheduler": {"target_itl_s": 0.02}},
    "max": {"allocator": "contiguous_max", "cache": {"enable_prefix_caching": False}},
    "pow2": {"allocator": "contiguous_pow2", "cache": {"enable_prefix_caching": False}},
}


@pytest.fixture(scope="module")
def short() -> Trace:
    """Requests of the conversation slice that a small pool can hold, at once and with short outputs."""
    trace = read_trace(DATA / TRACES[0], "mooncake", max_requests=200)
    fitting = (one for one in trace.requests if one.num_prompt_tokens < 4000)
    requests = [
        dataclasses.replace(
            one, index=i, num_output_tokens=min(one.num_output_tokens, 200), arrival_s=i / 20
        )
        for i, one in enumerate(itertools.islice(fitting, 40))
    ]
    return Trace(name="short", requests=tuple(requests))


@pytest.mark.parametrize("name", ARMS)
def test_every_request_gets_its_tokens(short, name):
    simulator = Simulator(arm(**ARMS[name]), short)
    schedule, num_steps = simulator.scheduler.schedule, 0

    def checked():
        nonlocal num_steps
        num_steps += 1
        if num_steps % 97 == 0:
            simulator.check_invariants()
        return schedule()

    simulator.scheduler.schedule = checked
    simulator.run()
    simulator.check_invariants()
    measures, counters = simulator.measures, simulator.scheduler.counters
    assert len(measures.e2el_s) == len(measures.ttft_s) == len(short.requests)
    assert measures.num_output_tokens == short.num_output_tokens
    assert len(measures.itl_s) == short.num_output_tokens - len(short.requests)
    assert measures.num_prompt_tokens == short.num_prompt_tokens
    known = short.num_prompt_tokens + short.num_output_tokens - len(short.requests)
    recomputed = measures.num_computed_tokens - (known - measures.num_cached_tokens)
    assert (recomputed > 0) == (counters.num_recomputes > 0)
    assert (counters.num_preemptions > 0) == name.startswith("tight")
    assert counters.num_swaps == 0 or "swap" in name or "auto" in name
    assert 0 < measures.held_token_s <= measures.owned_slot_s
    assert min(measures.ttft_s) > 0
    assert min(measures.itl_s) > 0
    assert measures.end_s >= measures.busy_s
    assert simulator.scheduler.kv.num_owned_pages == 0


def test_two_runs_are_equal(short):
    config = arm(**ARMS["tight auto"])
    assert measured(simulate(config, short)) == measured(simulate(config, short))


def test_continuous_beats_static_and_the_cache_saves_work(short):
    plain, static, without = (
        simulate(arm(**ARMS[name]), short) for name in ("plain", "static", "no cache")
    )
    assert plain.measures.end_s < static.measures.end_s
    assert plain.token_hit_rate > 0.02
    assert without.token_hit_rate == 0.0
    assert plain.measures.num_computed_tokens < without.measures.num_computed_tokens


def test_swapping_moves_pages_on_the_clock(short):
    """With a host link a thousand times slower every swap takes seconds."""
    slow = dataclasses.replace(H100, host_bytes_per_s=H100.host_bytes_per_s / 1000)
    config = arm(**ARMS["tight swap"])
    fast_run, slow_run = (
        simulate(one, short) for one in (config, dataclasses.replace(config, chip=slow))
    )
    assert fast_run.counters["num_swaps"] > 0
    assert slow_run.measures.end_s > 2 * fast_run.measures.end_s
    auto = dataclasses.replace(arm(**ARMS["tight auto"]), chip=slow)
    assert simulate(auto, short).counters["num_swaps"] == 0


def test_a_scheduler_that_plans_nothing_is_reported():
    simulator = Simulator(arm(), uniform(2, 10, 2))
    simulator.scheduler.schedule = lambda: None
    with pytest.raises(SimulationError, match=r"plans nothing at 0 s with 2 requests left"):
        simulator.run()


# Settings


def test_pages_are_what_the_chips_hold_unless_given():
    assert simulate(arm(), uniform(1, 10, 2)).num_pages == ROOFLINE.num_pages_that_fit(16)
    assert simulate(arm(cache={"num_pages": 99}), uniform(1, 10, 2)).num_pages == 99
    assert simulate(arm(unlimited_pages=True), uniform(1, 10, 2)).num_pages is None


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"allocator": "buddy"}, "allocator must be one of paged, .* got 'buddy'"),
        ({"arrivals": "now"}, "arrivals must be one of timed, sequential, got 'now'"),
        ({"max_model_len": 1}, "max_model_len must be at least 2, got 1"),
        ({"rate_scale": 0.0}, "rate_scale must be a number > 0, got 0.0"),
        ({"rate_scale": float("nan")}, "rate_scale must be a number > 0, got nan"),
        ({"rate_scale": float("inf")}, "rate_scale must be a number > 0, got inf"),
        ({"unlimited_pages": True, "cache": {"num_pages": 9}}, "either a number or unlimited"),
        ({"allocator": "contiguous_max"}, "enable_prefix_caching must be False"),
        (
            {
                "allocator": "contiguous_pow2",
                "cache": {"enable_prefix_caching": False, "host_kv_gib": 1.0},
            },
            "host_kv_gib must be 0, got 1",
        ),
        (
            {"chunked_prefill": False, "scheduler": {"target_itl_s": 0.1}},
            "chunked_prefill must be True",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, fault):
    with pytest.raises(ConfigError, match=fault):
        arm(**changes)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"max_model_len": 100}, "max_model_len 100 is too small for .* longest request of 300"),
        ({"cache": {"num_pages": 19}}, "num_pages 19 is too small: .* of 300 tokens .* needs 20"),
        ({"num_chips": 5}, "num_chips must divide"),
        ({"scheduler": {"preemption_mode": "swap"}}, "host_kv_gib"),
        (
            {
                "allocator": "contiguous_max",
                "max_model_len": 2048,
                "cache": {"enable_prefix_caching": False, "num_pages": 100},
            },
            "num_pages 100 is too small: .* needs 129",
        ),
        (
            {
                "allocator": "contiguous_max",
                "cache": {"enable_prefix_caching": False, "num_pages": 2**31 - 1},
            },
            "num_pages must be at most 134217728 .* got 2147483647",
        ),
        ({"rate_scale": 1e-12}, "rate_scale 1e-12 lets the last request arrive after 2e.12 s"),
        ({"rate_scale": 1e-320}, "arrive after inf s"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(changes, fault):
    with pytest.raises(ConfigError, match=fault):
        simulate(arm(**changes), uniform(2, 200, 100, every_s=2.0))


def test_whole_prompts_longer_than_any_step_are_refused():
    with pytest.raises(ConfigError, match=r"chunked_prefill False .* 1048600 .* holds 1048576"):
        simulate(arm(chunked_prefill=False, unlimited_pages=True), uniform(1, 2**20, 24))


def test_more_pages_than_anybody_can_fill_are_not_made():
    """2**31 pages, and more in host RAM, would take 100 GB of lists."""
    trace = uniform(2, 200, 100)
    much = {"num_pages": 2**31 - 1, "host_kv_gib": 2.0**20}
    result = simulate(arm(cache=much), trace)
    assert result.num_pages == 2**31 - 1
    expected = measured(simulate(arm(unlimited_pages=True), trace))
    assert measured(result) == expected | {"num_pages": 2**31 - 1}
    # Each request fits, but what all of them could fill is too much.
    many = uniform(150, 2**24, 2)
    with pytest.raises(ConfigError, match=r"num_pages must be at most 134217728 .* got"):
        simulate(arm(unlimited_pages=True), many)


def test_the_json_is_json():
    record = simulate(arm(), uniform(1, 10, 1)).to_json()
    assert record["itl_s"] is None  # one token has no gap
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_percentiles_of_samples():
    from array import array

    assert percentiles(array("d")) is None
    found = percentiles(array("d", range(101)))
    assert found == {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
