"""Fixtures of the command line's tests: a checkpoint folder that `FakeLLM` accepts, and the fake in place."""

import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxserve.cli import text_engine
from jaxserve.cli.main import main
from tests.cli.fake_llm import FakeLLM

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(100))
    return folder


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeLLM]]:
    """Puts `FakeLLM` in the place of `LLM`; holds those that were made."""
    llms: list[FakeLLM] = []

    def load(model: str, options: dict[str, object]) -> FakeLLM:
        llms.append(FakeLLM(model, **options))
        return llms[-1]

    monkeypatch.setattr(text_engine, "load_llm", load)
    logger = logging.getLogger("jaxserve")
    before = logger.handlers[:], logger.level
    yield llms
    logger.handlers[:] = before[0]
    logger.setLevel(before[1])


@pytest.fixture
def run(made: list[FakeLLM], model: Path) -> Callable[..., int]:
    """`jaxserve run` over the fake, in this process: arguments -> exit code."""
    return lambda *arguments: main(["run", f"--model={model}", *map(str, arguments)])


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`jaxserve run` over the fake, as a process: (seconds a step, arguments, load_s) -> the process."""
    with contextlib.ExitStack() as stack:

        def start_process(
            step_s: float, *arguments: object, load_s: float = 0
        ) -> subprocess.Popen[str]:
            program = [sys.executable, "-m", "tests.cli.fake_llm", str(step_s), str(load_s)]
            process = subprocess.Popen(
                [*program, "run", f"--model={model}", *map(str, arguments)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)  # waits and closes the pipes
            stack.callback(process.kill)  # before that, in case the test failed
            return process

        yield start_process


def read_records(path: Path) -> list[dict]:
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]
