"""`jaxserve bench kernels`: figures from times, and one small run of each kind."""

import functools
import json

import pytest

from jaxserve.cli import bench_kernels
from jaxserve.cli.main import main
from jaxserve.device import ceilings
from jaxserve.device.attention_timing import ArmTimes, least_work, plan_arms
from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention.arg_specs import (
    HEADS,
    LARGE_STEPS,
    STEPS,
    StepSpec,
)

KNOWN = ceilings.Ceilings(stream_bytes_per_s=1e9, gemm_flops_per_s=1e12)


@pytest.fixture
def bench(monkeypatch, capsys):
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda dtype: KNOWN)

    def run(*flags: str) -> dict:
        assert main(["bench", "kernels", "--repetitions=1", *flags]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_figures_are_medians_against_the_first_backend_and_the_least_time():
    times = {"a": ArmTimes([2.0, 4.0, 3.0], 9.0), "b": ArmTimes([1.5, 1.0, 8.0], 7.0)}
    figures = bench_kernels.step_figures(times, 0.6)
    assert figures["least_ms"] == 600
    a, b = figures["backends"]["a"], figures["backends"]["b"]
    assert (a["median_ms"], a["min_ms"], a["max_ms"], a["compile_s"]) == (3000, 2000, 4000, 9)
    assert (a["ratio"], b["ratio"]) == (1, 0.5)
    assert (a["of_ceiling"], b["of_ceiling"]) == pytest.approx((0.2, 0.4))


def test_each_backend_is_timed(bench):
    result = bench("--layers=1", "--steps=decode-b1-c512", "--backends=xla,reference")
    step = result["steps"]["decode-b1-c512"]
    assert list(step["backends"]) == ["xla", "reference"]
    assert step["backends"]["xla"]["ratio"] == 1
    assert step["backends"]["reference"]["median_ms"] > 0
    assert step["least_ms"] == pytest.approx(step["bytes"] / 1e6)  # at 1 GB/s memory is what bounds
    assert (result["num_layers"], result["ceilings"]["dtype"]) == (1, "float32")


def test_what_is_measured_is_said_while_it_is(monkeypatch, capsys):
    flags = ["--repetitions=1", "--layers=1", "--steps=decode-b1-c512,chunk-8x64", "--backends=xla"]
    small = functools.partial(ceilings.measure_ceilings, stream_bytes=1 << 16, gemm_size=8)
    monkeypatch.setattr(ceilings, "measure_ceilings", small)
    assert main(["bench", "kernels", *flags]) == 0
    said = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "what the machine can do",
        "memory",
        "matrix product, float32",
        *["step 1 of 2, decode-b1-c512", "  xla", "  xla"],
        *["step 2 of 2, chunk-8x64", "  xla", "  xla"],
    ]


def test_help_lists_the_heads_and_steps_that_there_are(capsys):
    assert tuple(HEADS) == bench_kernels.HEAD_NAMES
    assert tuple(STEPS) == bench_kernels.STEP_NAMES
    large = tuple(name for name in LARGE_STEPS if name not in STEPS)
    assert large == bench_kernels.LARGE_STEP_NAMES
    assert main(["bench", "kernels", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "arg_specs" not in text
    assert all(name in text for name in (*HEADS, *STEPS, *LARGE_STEPS))


def test_roofline_alone_times_no_kernel(bench):
    result = bench("--roofline")
    assert result["ceilings"] == vars(KNOWN) | {"dtype": "float32"}
    assert "steps" not in result


def test_backends_are_what_auto_may_choose_and_serves(monkeypatch):
    heads = HEADS["tiny"]
    monkeypatch.setitem(dispatch.AUTO, "cpu", ("gpu", "reference", "xla"))
    plan = plan_arms([], dtype="auto", page_size=None, heads=heads)
    assert plan == (["reference", "xla"], "float32", 64)


def test_least_work_counts_whole_pages_and_causal_pairs():
    heads = HEADS["tiny"]
    plan = plan_arms(["xla"], dtype="float32", page_size=64, heads=heads)
    step = StepSpec(num_rows=2, num_tokens=3, context=65)
    num_bytes, num_flops = least_work(plan, step, heads, num_layers=5)
    assert num_bytes == 5 * 2 * 2 * (64 * 2 * 3 * 64 * 4)
    assert num_flops == 5 * 4 * 9 * 64 * 2 * (63 + 64 + 65)


def test_ceilings_bound_by_whichever_takes_longer():
    assert KNOWN.least_s(2e9, 1e12) == 2
    assert KNOWN.least_s(1e9, 3e12) == 3
    measured = ceilings.measure_ceilings(stream_bytes=1 << 20, gemm_size=64, repetitions=2)
    assert measured.stream_bytes_per_s > 1e6
    assert measured.gemm_flops_per_s > 1e6
