"""The command line on a real (tiny) model, as a user starts it: in processes of their own."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxserve.cli.output_files import all_files
from tests.cli.conftest import ROOT, read_records
from tests.cli.test_run import TWELVE_LINES, write_lines

ENGINE_FLAGS = ["--max_num_seqs=2", "--max-num-batched-tokens=8", "--max_model_len=64"]
ENGINE_FLAGS += ["--token-buckets=2,8", "--row-buckets=2"]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("xla")


def command_line(cache_dir: Path, *arguments: str) -> list[str]:
    command, *rest = arguments
    kind = [rest.pop(0)] if command == "bench" else []
    flags = [
        "--model=checkpoints/tiny_llama",
        f"--compilation-cache-dir={cache_dir}",
        *ENGINE_FLAGS,
    ]
    return [sys.executable, "-m", "jaxserve", command, *kind, *flags, *rest]


def jaxserve(cache_dir: Path, *arguments: str, code: int = 0) -> str:
    process = subprocess.run(
        command_line(cache_dir, *arguments), cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == code, process.stderr
    assert "Traceback" not in process.stderr
    return process.stdout


def test_c45_twelve_lines_and_again_byte_for_byte(cache_dir, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(TWELVE_LINES)
    flags = [f"--input={source}", "--temperature=0"]
    jaxserve(cache_dir, "run", *flags, f"--output={output}", code=1)
    records = read_records(output)
    good = [record["index"] for record in records if "error" not in record]
    assert [record["index"] for record in records] == list(range(12))
    assert good == [0, 7, 8, 10, 11]
    again = jaxserve(cache_dir, "run", *flags, code=1)  # to stdout
    assert again.encode() == output.read_bytes()
    # The same prompt on the screen is the same text.
    shown = jaxserve(cache_dir, "run", "--temperature=0", "--max-tokens=4", "hello")
    assert shown == records[0]["text"] + "\n"


def test_a_second_start_finds_every_program(cache_dir):
    """In a process of its own: nothing in what programs are found by changes from one to the next."""
    command = command_line(cache_dir, "run", "--max-tokens=1", "hello")
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = re.search(r"preparing (\d+) programs, (\d+) of them", done.stderr)
    assert found, done.stderr
    assert found[1] == found[2]


def test_bench_compiles_nothing_and_both_arms_generate_as_much(cache_dir, tmp_path):
    lines = [
        {"id": f"w{i}", "prompt": f"some words {i}", "max_tokens": 5 + i, "temperature": 0}
        for i in range(5)
    ]
    workload = write_lines(tmp_path / "w.jsonl", lines)
    outputs = tmp_path / "o.jsonl"
    flags = [f"--workload={workload}", "--scheduling=static,continuous", f"--outputs={outputs}"]
    result = json.loads(jaxserve(cache_dir, "bench", "offline", *flags))
    for arm in result["arms"].values():
        assert arm["compiles_after_warmup"] == 0
        assert arm["num_output_tokens"] == sum(len(r["output_ids"]) for r in read_records(outputs))
        assert arm["output_tokens_per_s"] > 0


def stop_after(
    seconds: float, signum: signal.Signals, cache_dir: Path, output: Path
) -> tuple[int, str, float]:
    """(exit code, stderr, when the signal was sent) of a run that gets a signal after a while."""
    for path in all_files(output):  # of a run before it that came to its end
        path.unlink(missing_ok=True)
    process = subprocess.Popen(
        command_line(cache_dir, "run", "--max-tokens=9", f"--output={output}", *["hello"] * 20),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not output.exists():  # locked: from here on signals are held
        time.sleep(0.005)
    time.sleep(seconds)
    process.send_signal(signum)
    sent = time.monotonic()
    _, err = process.communicate(timeout=60)
    return process.returncode, err, sent


# In turns: which of the two it is makes a difference only to the exit code and to what is said.
@pytest.mark.parametrize(
    ("signum", "share"),
    [
        (signal.SIGINT, 0),
        (signal.SIGTERM, 0.15),
        (signal.SIGINT, 0.3),
        (signal.SIGTERM, 0.45),
        (signal.SIGINT, 0.6),
        (signal.SIGTERM, 0.75),
    ],
)
def test_a_signal_at_any_time_of_the_start_ends_it_cleanly(
    cache_dir, tmp_path, load_s, signum, share
):
    output, err = tmp_path / "out.jsonl", ""
    code, sent = 0, 0.0
    while not code:
        code, err, sent = stop_after(load_s * share, signum, cache_dir, output)
        # Done before the signal came: the machine is faster now than when load_s was measured.
        assert code or share, "a signal as soon as there is a lock was not seen"
        share /= 2
    assert code == 128 + signum, err
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    if err.endswith(f"stopped by {signum.name} before anything was generated\n"):
        assert time.monotonic() - sent < 2
        assert list(tmp_path.iterdir()) == []
    else:
        assert f"stopped by {signum.name}: " in err
        assert err.endswith("the same command with --resume goes on\n")


@pytest.fixture(scope="module")
def load_s(cache_dir) -> float:
    """Seconds from the start of a process to its end, with everything compiled before."""
    jaxserve(cache_dir, "run", "--max-tokens=1", "hello")
    started = time.monotonic()
    jaxserve(cache_dir, "run", "--max-tokens=1", "hello")
    return time.monotonic() - started
