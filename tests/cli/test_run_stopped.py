"""Stopping a run: Ctrl-C, SIGTERM, kill -9; and going on."""

import array
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from jaxserve.cli.output_files import partial_path
from tests.cli.conftest import ROOT, read_records
from tests.cli.fake_llm import expected_text
from tests.cli.test_run import write_lines

NUM_LINES = 40
STEP_S = 0.02
# The first line is slow, so that others wait for it; then fast ones, so that the output grows.
LINES = [
    {"id": f"i{i}", "prompt": f"prompt {i}", "max_tokens": 60 if i in (0, 20) else 1 + i % 4}
    for i in range(NUM_LINES)
]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    source = write_lines(tmp_path / "in.jsonl", LINES)
    return [f"--input={source}", f"--output={tmp_path}/out.jsonl", "--max-num-seqs=4"]


def wait_for(path: Path, num_records: int) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() or path.read_bytes().count(b"\n") < num_records:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_full(pipe) -> None:
    """Until whoever writes to the pipe has to wait for a reader."""
    waiting, before, end = array.array("i", [0]), 0, time.monotonic() + 60
    size = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
    while time.monotonic() < end:
        fcntl.ioctl(pipe, termios.FIONREAD, waiting)
        if (
            waiting[0] == before and before > size // 2
        ):  # its buffers are pages, not all of them full
            return
        before = waiting[0]
        time.sleep(1)
    raise AssertionError(f"{waiting[0]} of {size} bytes lie in the pipe after a minute")


def check_whole(output: Path) -> None:
    records = read_records(output)
    assert [record["id"] for record in records] == [line["id"] for line in LINES]
    for line, record in zip(LINES, records, strict=True):
        assert record["text"] == expected_text(line["prompt"], line["max_tokens"])
    assert not partial_path(output).exists()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_is_finished_and_resume_does_the_rest(
    start, flags, tmp_path, signum, code
):
    output = tmp_path / "out.jsonl"
    process = start(STEP_S, *flags)
    wait_for(partial_path(output), 3)
    process.send_signal(signum)
    process.send_signal(signum)  # an echo, as `timeout` sends one, does no harm
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "Traceback" not in err
    in_output = [record["index"] for record in read_records(output)]
    waiting = [record["index"] for record in read_records(partial_path(output))]
    num_done = len({*in_output, *waiting})
    assert num_done == len(in_output) + len(waiting), "the partial file holds what the output has"
    assert 3 <= num_done < NUM_LINES
    verb = "waits" if len(waiting) == 1 else "wait"
    assert (
        f": {len(in_output)} of {NUM_LINES} lines are in {output}, "
        f"{len(waiting)} more {verb} in {partial_path(output)}; the same command with --resume"
    ) in err

    process = start(0, *flags, "--resume")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert f"{NUM_LINES - num_done} done, 0 failed" in err, "something was done twice"
    check_whole(output)


def test_kill_at_any_point_then_resume(start, flags, tmp_path):
    output = tmp_path / "out.jsonl"
    for attempt, (path, num_records) in enumerate(
        [(partial_path(output), 2), (partial_path(output), 6), (output, 22)]
    ):
        process = start(STEP_S, *flags, *(["--resume"] if attempt else []))
        wait_for(path, num_records)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
        for torn in (output, partial_path(output)):
            with open(torn, "ab") as stream:
                stream.write(b'{"index": 39, "id": "i39", "text": "torn')
    process = start(0, *flags, "--resume")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    check_whole(output)
    num_done = re.search(r"(\d+) done, 0 failed", err)
    assert num_done is None or int(num_done[1]) <= NUM_LINES - 22


def test_a_signal_while_the_model_loads_stops_at_once(start, flags, tmp_path):
    process = start(0, *flags, load_s=60)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert err == "stopped by SIGINT before anything was generated\n"
    assert not (tmp_path / "out.jsonl").exists()


def test_a_signal_while_a_new_output_is_locked_leaves_no_file(start, flags, tmp_path):
    before = sorted(tmp_path.iterdir())
    process = start(0, *flags, load_s=60)
    deadline = time.monotonic() + 30
    while not (tmp_path / "out.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert sorted(tmp_path.iterdir()) == before


def test_a_second_signal_ends_it_at_once_and_resume_goes_on(start, flags, tmp_path):
    output = tmp_path / "out.jsonl"
    process = start(1, *flags)  # the first signal waits for the step
    wait_for(output.with_name("out.jsonl.meta.json"), 1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode in (130, 143), err
    process = start(0, *flags, "--resume")
    process.communicate(timeout=30)
    assert process.returncode == 0
    check_whole(output)


@pytest.mark.parametrize("flags", [["--output=-"], []])
def test_a_stdout_that_nobody_reads_does_not_hold_it(start, flags):
    process = start(0, *flags, "--max-tokens=100", *["hello"] * 200)
    wait_until_full(process.stdout)
    assert process.poll() is None, "the pipe was never full"
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == 130
    assert "stopped by SIGINT at once, by a second signal\n" in process.stderr.read()


def test_signals_at_the_very_end_change_no_exit_code(start):
    process = start(0.005, "--max-tokens=5", "hello")
    assert process.stdout.read(1)
    codes = set()
    for _ in range(10_000):
        process.send_signal(signal.SIGTERM)
        if process.poll() is not None:
            break
        time.sleep(0.0005)
    codes.add(process.wait(timeout=30))
    assert codes <= {0, 143}


def test_a_stopped_prompt_counts_both_its_prompt_and_its_output(start):
    process = start(0.05, "--max-tokens=100", "hello")
    process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    counts = re.search(r"0 done, 0 failed: 5 prompt tokens \(0 cached\), (\d+) output tokens", err)
    assert counts, err
    assert 1 <= int(counts[1]) < 100


def test_a_signal_while_a_pipe_has_nothing_stops_at_once(start, tmp_path):
    output = tmp_path / "out.jsonl"
    process = start(0, "--input=-", "--max-tokens=1", f"--output={output}")
    process.stdin.write('{"prompt": "a"}\n')
    process.stdin.flush()
    wait_for(output, 1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    err = process.stderr.read()
    assert "Traceback" not in err
    assert "--resume" not in err, "a pipe cannot be resumed"


def test_resume_counts_ids_of_lines_that_were_done(start, tmp_path):
    lines = [{"id": "a", "prompt": "x", "max_tokens": 2}, {"id": "a", "prompt": "y"}]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    flags = [f"--input={source}", f"--output={output}"]
    process = start(0, *flags)
    process.communicate(timeout=30)
    first = output.read_bytes()
    assert json.loads(first.splitlines()[1])["error"]["code"] == "duplicate_id"
    output.write_bytes(first.splitlines(keepends=True)[0])
    process = start(0, *flags, "--resume")
    process.communicate(timeout=30)
    assert process.returncode == 1
    assert output.read_bytes() == first


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_bench_at_once(model, tmp_path, signum):
    workload = write_lines(tmp_path / "w.jsonl", LINES)
    program = [sys.executable, "-m", "tests.cli.fake_llm", "0", "60", "bench", "offline"]
    process = subprocess.Popen(
        [*program, f"--model={model}", f"--workload={workload}", f"--output={tmp_path}/o.json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(3)
    process.send_signal(signum)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signum, err
    assert (out, err) == (
        "",
        f"stopped by {signum.name} before a repetition was done: there is no result\n",
    )
    assert not (tmp_path / "o.json").exists()


@pytest.mark.parametrize("kind", ["offline", "latency"])
def test_a_signal_leaves_bench_with_the_repetitions_that_are_done(model, tmp_path, kind):
    program = [sys.executable, "-m", "tests.cli.fake_llm", "0.02", "0", "bench", kind]
    flags = [f"--model={model}", f"--output={tmp_path}/o.json", "--repetitions=1000"]
    flags += (
        ["--output_len=20", "--profile"]
        if kind == "latency"
        else [f"--workload={write_lines(tmp_path / 'w.jsonl', LINES)}"]
    )
    process = subprocess.Popen(
        [*program, *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    said = ""
    while not said.startswith("repetition 2 of 1000"):
        said = process.stderr.readline()
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, err
    result = json.loads(out)
    done = result["num_repetitions"]
    assert result["partial"] is True
    assert 2 <= done < 1000
    assert f"stopped by SIGTERM: the result is of {done} of 1000 repetitions\n" in err
    assert json.loads((tmp_path / "o.json").read_text()) == result
    assert "profile" not in result
    if kind == "offline":
        assert len(result["wall_s_each"]) == done
