"""The figures of scheduling_figures that the simulator gives: each a ratio of two arms in one run.

Called by scripts/scheduling_figures. Every figure fixes generator, seed, model, chip, rate and page
size here, so two runs print the same digits. What plots need is kept beside the numbers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan.chips import CHIPS
from jaxserve.plan.models import MODELS
from jaxserve.plan.roofline import Roofline
from jaxserve.plan.simulate import SimulationConfig, SimulationResult, simulate
from jaxserve.plan.synthetic import (
    exponential_lengths,
    log_normal_lengths,
    make_trace,
    poisson_arrivals,
)
from jaxserve.plan.traces import Trace
from scripts.scheduling.block_lru import hit_rate

SEED = 2024
MODEL, CHIP = "llama-3-8b", "h100"
BUDGET = 2048  # tokens a step, where a figure does not say otherwise
LONG_PROMPT = 8192  # tokens; a prompt at least so long counts as long in the report on TTFT
CAPACITIES = (1_000, 3_000, 10_000, 30_000, 100_000, None)  # blocks; None = all of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the report.

    Args:
        name: what is compared.
        setting: workload and machine, enough to run it again.
        found: the ratio or rate.
        goal: what it should be, in words.
        reached: whether it is.
        notes: further numbers, one a line.
        data: what the plot of it needs.
    """

    name: str
    setting: str
    found: str
    goal: str
    reached: bool
    notes: tuple[str, ...] = ()
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


def run_arm(
    trace: Trace,
    *,
    cache: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    **changes: Any,
) -> SimulationResult:
    """Simulates one arm of a figure on the figures' model and chip."""
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": BUDGET, **(scheduler or {})}
    config = SimulationConfig(
        model=MODELS[MODEL],
        chip=CHIPS[CHIP],
        cache=CacheConfig(page_size=16, **(cache or {})),
        scheduler=SchedulerConfig(**limits),
        **changes,
    )
    return simulate(config, trace)


def throughput(batch: int, goal: float) -> Figure:
    """Output tokens/s of continuous over static batching; everybody waits from the beginning.

    Args:
        batch: most sequences in a step.
        goal: the least ratio.
    """
    num_requests = 50 * batch
    rng = np.random.default_rng(SEED)
    trace = make_trace(
        "exponential",
        prompt_lengths=[64] * num_requests,
        output_lengths=exponential_lengths(rng, num_requests, 128, longest=2048),
    )
    rates = [
        run_arm(
            trace, scheduler={"max_num_seqs": batch, "scheduling": scheduling}
        ).output_tokens_per_s
        for scheduling in ("continuous", "static")
    ]
    ratio = rates[0] / rates[1]
    return Figure(
        name=f"continuous / static throughput, batch {batch}",
        setting=f"{num_requests} requests at once, prompts of 64, outputs exponential with mean 128",
        found=f"{ratio:.2f}x",
        goal=f">= {goal:g}x",
        reached=ratio >= goal,
        notes=(f"continuous {rates[0]:,.0f} tokens/s, static {rates[1]:,.0f}",),
    )


def utilisation() -> Figure:
    """Tokens held / slots of owned pages by allocator, with one pool that is too small for all."""
    num_requests, num_pages, longest = 1500, 4000, 2048
    rng = np.random.default_rng(SEED)
    prompts = log_normal_lengths(rng, num_requests, 160, sigma=1.0, longest=longest // 2)
    outputs = log_normal_lengths(rng, num_requests, 340, sigma=0.8, longest=longest // 2)
    arrivals = poisson_arrivals(rng, num_requests, 20.0)
    trace = make_trace(
        "log-normal", prompt_lengths=prompts, output_lengths=outputs, arrivals_s=arrivals
    )
    arms = {
        allocator: run_arm(
            trace,
            allocator=allocator,
            max_model_len=longest,
            cache={"num_pages": num_pages, "enable_prefix_caching": allocator == "paged"},
        )
        for allocator in ("paged", "contiguous_pow2", "contiguous_max")
    }
    found = {name: result.kv_utilisation for name, result in arms.items()}
    return Figure(
        name="KV utilisation, pages of 16 against max_model_len for everybody",
        setting=(
            f"{num_requests} requests at 20/s, prompts log-normal around 160 (mean "
            f"{prompts.mean():.0f}), outputs around 340 (mean {outputs.mean():.0f}), "
            f"max_model_len {longest}, {num_pages} pages of 16"
        ),
        found=f"{found['paged']:.1%} against {found['contiguous_max']:.1%}",
        goal=">= 96% against about 20%",
        reached=found["paged"] >= 0.96 and found["contiguous_max"] <= 0.25,
        notes=tuple(
            f"{name}: {one.kv_utilisation:.1%}, {one.measures.num_running_most} at once, "
            f"{one.output_tokens_per_s:,.0f} tokens/s"
            for name, one in arms.items()
        ),
        data=found,
    )


def interference() -> Figure:
    """The longest gap between two tokens of a stream while a 32k-token prompt is computed."""
    num_streams, prompt, chunk = 16, 32768, 256
    trace = make_trace(
        "streams",
        prompt_lengths=[512] * num_streams + [prompt],
        output_lengths=[400] * num_streams + [1],
        arrivals_s=[0.0] * num_streams + [1.0],
    )
    arms = {
        name: run_arm(trace, chunked_prefill=chunked, scheduler={"max_num_batched_tokens": size})
        for name, chunked, size in (
            (f"chunks of {chunk}", True, chunk),
            ("whole prompts", False, chunk),
            ("chunks of 512", True, 512),
        )
    }
    roofline = Roofline(MODELS[MODEL], CHIPS[CHIP])
    one_chunk_s = roofline.slice_s(0, chunk)
    worst = {name: max(result.measures.itl_s) for name, result in arms.items()}
    ratio = worst[f"chunks of {chunk}"] / one_chunk_s
    return Figure(
        name="worst ITL over one chunk's time, a 32k-token prompt among streams",
        setting=(
            f"{num_streams} streams with 512 tokens of context, a prompt of {prompt} after 1 s, chunks "
            f"of {chunk}; one chunk's time: the prompt's first, alone, {1e3 * one_chunk_s:.2f} ms"
        ),
        found=f"{ratio:.2f}x",
        goal="<= 2x",
        reached=ratio <= 2,
        notes=(
            *(
                f"{name}: worst {1e3 * worst[name]:.1f} ms, the long prompt's TTFT "
                f"{max(one.measures.ttft_s):.2f} s"
                for name, one in arms.items()
            ),
            f"chunks of 512 over one of 512: {worst['chunks of 512'] / roofline.slice_s(0, 512):.2f}x "
            "(attention over 32k keys costs more than the rest of a chunk)",
        ),
        data={
            name: (np.frombuffer(one.measures.itl_end_s), np.frombuffer(one.measures.itl_s))
            for name, one in arms.items()
        },
    )


def short_first(share: float, rate: float, goal: float | None) -> Figure:
    """p95 TTFT of chunks with the shortest first over whole prompts in order of arrival.

    Args:
        share: of long prompts among the requests.
        rate: requests a second.
        goal: the largest ratio; None = for information.
    """
    num_requests = 2000
    rng = np.random.default_rng(SEED)
    is_long = rng.random(num_requests) < share
    prompts = np.where(
        is_long,
        rng.integers(16384, 32769, num_requests),
        log_normal_lengths(rng, num_requests, 500, sigma=1.0, longest=4096),
    )
    trace = make_trace(
        "mixed",
        prompt_lengths=prompts,
        output_lengths=log_normal_lengths(rng, num_requests, 200, sigma=0.8, longest=1024),
        arrivals_s=poisson_arrivals(rng, num_requests, rate),
    )
    whole = run_arm(trace, chunked_prefill=False)
    arms = {
        "whole prompts, fcfs": whole,
        "chunks, fcfs": run_arm(trace),
        "chunks, short_first": run_arm(trace, scheduler={"admission": "short_first"}),
    }
    p95 = {name: _ttft(one, 95) for name, one in arms.items()}
    ratio = p95["chunks, short_first"] / p95["whole prompts, fcfs"]
    return Figure(
        name=f"p95 TTFT, short_first over whole prompts, {share:.0%} long",
        setting=(
            f"{num_requests} requests at {rate:g}/s, {share:.0%} of 16k to 32k tokens, the others "
            "log-normal around 500, outputs around 200"
        ),
        found=f"{ratio:.2f}x",
        goal="for information" if goal is None else f"<= {goal:g}x",
        reached=goal is None or ratio <= goal,
        notes=tuple(
            f"{name}: p95 {p95[name]:.3f} s; short p95 {_ttft(one, 95, long=False):.3f} s; long p50 "
            f"{_ttft(one, 50, long=True):.3f}, p95 {_ttft(one, 95, long=True):.3f} s; worst ITL "
            f"{1e3 * max(one.measures.itl_s):.0f} ms"
            for name, one in arms.items()
        ),
    )


def _ttft(result: SimulationResult, percentile: float, *, long: bool | None = None) -> float:
    """A percentile of TTFT, seconds; of long or of other prompts only, if asked."""
    seconds = np.frombuffer(result.measures.ttft_s)
    lengths = np.frombuffer(result.measures.ttft_prompt_tokens, np.int64)
    chosen = (
        slice(None) if long is None else lengths >= LONG_PROMPT if long else lengths < LONG_PROMPT
    )
    return float(np.percentile(seconds[chosen], percentile))


def block_hits(
    trace: Trace, goal: float, capacities: Sequence[int | None] = CAPACITIES
) -> list[Figure]:
    """Sequential block hit rates, at several capacities, beside an independent count.

    Args:
        trace: with blocks.
        goal: published rate with unlimited pages.
        capacities: in blocks.
    """
    prompts = [one.blocks.tolist() for one in trace.requests if one.blocks is not None]
    figures = []
    for capacity in capacities:
        num_pages = None if capacity is None else 1 + capacity * 512 // 16
        result = run_arm(
            trace,
            arrivals="sequential",
            unlimited_pages=capacity is None,
            cache={"num_pages": num_pages},
        )
        assert result.block_hit_rate is not None
        counted = hit_rate(prompts, capacity)
        found = result.block_hit_rate
        wanted = goal if capacity is None else counted
        allowed = 0.00005 if capacity is None else 0.01
        figures.append(
            Figure(
                name=f"block hit rate, {trace.name}, "
                + ("unlimited" if capacity is None else f"{capacity:,} blocks"),
                setting=f"{len(prompts)} requests one after another, pages of 16",
                found=f"{found:.2%}",
                goal=f"{wanted:.2%}" + ("" if capacity is None else " within a point"),
                reached=abs(found - wanted) <= allowed,
                notes=(f"independent LRU count {counted:.2%}; {result.wall_s:.1f} s",),
                data={"capacity": capacity, "found": found, "counted": counted},
            )
        )
    return figures
