"""scripts/scheduling_figures: a figure is what its two arms measured, and a missed goal is an exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.plan.traces import read_trace
from scripts.scheduling import simulated
from scripts.scheduling.block_lru import hit_rate

ROOT = Path(__file__).parent.parent.parent
TRACE = ROOT / "tests" / "plan" / "data" / "mooncake_synthetic.jsonl"


def test_an_lru_list_by_hand():
    prompts = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [9, 2]]
    assert hit_rate(prompts, None) == (0 + 2 + 3 + 0) / 11
    # 3 blocks: the second prompt pushes out 3, and 2 behind another beginning is no hit
    assert hit_rate(prompts, 3) == (0 + 2 + 2 + 0) / 11
    assert hit_rate(prompts, 1) == (0 + 1 + 1 + 0) / 11


def test_throughput():
    figure = simulated.throughput(4, goal=1.5)
    assert figure.reached
    assert float(figure.found.rstrip("x")) > 1.5
    assert not simulated.throughput(4, goal=9.0).reached


def test_interference_is_bounded_by_the_chunk():
    figure = simulated.interference()
    assert figure.reached
    worst = {name: gaps.max() for name, (_, gaps) in figure.data.items()}
    assert worst["chunks of 256"] < worst["chunks of 512"] < worst["whole prompts"] / 20


def test_hit_rates_beside_an_independent_count():
    trace = read_trace(TRACE, "mooncake", max_requests=80)
    prompts = [one.blocks.tolist() for one in trace.requests if one.blocks is not None]
    limited, unlimited = simulated.block_hits(trace, hit_rate(prompts, None), (300, None))
    assert limited.reached
    assert unlimited.reached
    assert limited.data["found"] < unlimited.data["found"]
    (wrong,) = simulated.block_hits(trace, 0.99, (None,))
    assert not wrong.reached


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--skip_simulator"], 0, "0 figures in 0 s, 0 missed"),
        (["--help"], 0, "--conversation FILE"),
        (["--plot=x"], 2, "unrecognized arguments"),
    ],
)
def test_the_script(arguments, code, text):
    script = str(ROOT / "scripts" / "scheduling_figures")
    done = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code
    assert text in done.stdout + done.stderr
