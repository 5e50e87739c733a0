"""The examples run as they stand, each in a process of its own, as a reader would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.llms import TINY

pytestmark = pytest.mark.timeout(240)

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run_example(name: str, *arguments: str, repository: Path) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(
        command,
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_here():
    here = Path(__file__).read_text()
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(
        re.findall(r'run_example\("(\w+\.py)"', here)
    )


def test_start(repository):
    lines = run_example("start.py", str(TINY), repository=repository).splitlines()
    assert lines[0].startswith("'The capital of France is' -> ")
    assert lines[1].startswith("'Once upon a time' -> ")
    assert [line[:9] for line in lines if line.startswith("choice ")] == ["choice 0:", "choice 1:"]


def test_grpo_learns_and_its_logprobs_are_those_of_training(repository):
    found = re.findall(
        r"^(\d+): reward ([\d.]+), logprobs within (\S+)$",
        run_example("grpo_tiny.py", repository=repository),
        re.MULTILINE,
    )
    rewards = [float(reward) for _, reward, _ in found]
    assert len(rewards) == 10
    assert rewards[0] < 0.6
    assert rewards[-1] > 0.9
    assert 0 < max(float(difference) for *_, difference in found) <= 1e-4
