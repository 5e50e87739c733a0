"""The bar is there where a person looks, and nowhere else."""

import os
import pty
import subprocess
import sys

from tests.cli.conftest import ROOT
from tests.cli.test_run import write_lines


def test_a_terminal_gets_a_bar_with_rate_and_pages(model, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a", "max_tokens": 9, "odd": 1}] * 8)
    ours, theirs = pty.openpty()
    program = [sys.executable, "-m", "tests.cli.fake_llm", "0.05", "0", "run", f"--model={model}"]
    process = subprocess.Popen(
        [*program, f"--input={source}", "--max-num-seqs=2"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
        if not data:
            break
        shown += data
    os.close(ours)
    assert process.wait(timeout=30) == 0
    assert b"8/8" in shown
    assert b"tokens/s" in shown
    assert b"pages in use" in shown
    assert b"unknown field 'odd'" in shown


def test_a_file_gets_no_bar(start, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a", "max_tokens": 2}])
    process = start(0, f"--input={source}")
    _, err = process.communicate(timeout=30)
    assert "pages in use" not in err
    assert "\x1b" not in err
    assert err.count("\n") == 1
