"""The command line on a real (tiny) model, as a user starts it: in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, read_records
from tests.cli.test_run import TWELVE_LINES, write_lines

ENGINE_FLAGS = ["--max_num_seqs=2", "--max-num-batched-tokens=8", "--max_model_len=64"]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("xla")


def jaxserve(cache_dir: Path, *arguments: str, code: int = 0) -> str:
    command, *rest = arguments
    kind = [rest.pop(0)] if command == "bench" else []
    flags = [
        "--model=checkpoints/tiny_llama",
        f"--compilation-cache-dir={cache_dir}",
        *ENGINE_FLAGS,
    ]
    process = subprocess.run(
        [sys.executable, "-m", "jaxserve", command, *kind, *flags, *rest],
        cwd=ROOT,
        capture_output=True,
        text=True,
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
