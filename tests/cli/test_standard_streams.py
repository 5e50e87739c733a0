"""Standard streams that are closed or full: a clear line, and nothing in the wrong place."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, read_records
from tests.cli.fake_llm import expected_text
from tests.cli.test_run import write_lines

FAKE = [sys.executable, "-m", "tests.cli.fake_llm", "0", "0"]


@pytest.fixture
def redirected(model: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`jaxserve` over the fake, started by a shell: (redirections, arguments) -> the ended process."""

    def run_redirected(how: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command, *rest = map(str, arguments)
        flags = [f"--model={model}"] if command == "run" and rest != ["--help"] else []
        return subprocess.run(
            ["sh", "-c", f'exec "$@" {how}', "sh", *FAKE, command, *flags, *rest],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run_redirected


def check_error(process: subprocess.CompletedProcess[str], message: str) -> None:
    assert process.returncode == 2, process.stderr
    assert process.stderr.splitlines()[-1] == message
    assert "Traceback" not in process.stderr
    assert "Exception ignored" not in process.stderr


@pytest.mark.parametrize("how", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_with_an_output_a_closed_stdout_does_no_harm(redirected, tmp_path, how):
    output = tmp_path / "o.jsonl"
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "hi"}])
    for given in (["hi"], [f"--input={source}"]):
        process = redirected(how, "run", "--max-tokens=3", f"--output={output}", *given)
        assert process.returncode == 0, process.stderr
        assert "Traceback" not in process.stderr
        assert [record["text"] for record in read_records(output)] == [expected_text("hi", 3)]
        output.unlink()


@pytest.mark.parametrize("flags", [["hi"], ["--output=-", "hi"], ["--input={source}"]])
def test_a_closed_stdout_that_is_needed_is_said_before_anything_is_done(
    redirected, tmp_path, flags
):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "hi"}])
    process = redirected(">&-", "run", *(flag.format(source=source) for flag in flags))
    check_error(process, "jaxserve run: cannot write stdout: it is closed; give --output=FILE")
    assert process.stderr.count("\n") == 1


def test_a_closed_stdin_is_named(redirected):
    process = redirected("<&-", "run", "--input=-")
    check_error(process, "jaxserve run: cannot read --input=-: stdin is closed")
    process = redirected("<&-", "run", "--max-tokens=2", "hi")
    assert process.returncode == 0
    assert process.stdout == expected_text("hi", 2) + "\n"


def test_a_stdin_that_cannot_be_read_is_named(redirected):
    check_error(
        redirected("0> /dev/null", "run", "--input=-"),
        "jaxserve run: cannot read --input=-: Bad file descriptor",
    )


@pytest.mark.parametrize("how", ["2>&-", "2>/dev/full"])
def test_without_a_stderr_logs_vanish_and_never_go_to_stdout(redirected, how):
    process = redirected(how, "run", "--max-tokens=2", "--verbosity=1", "hi", "")
    assert process.returncode == 1
    assert process.stdout == f"> hi\n{expected_text('hi', 2)}\n\n> \n\n"
    process = redirected(how, "run", "--nonsense")
    assert (process.returncode, process.stdout) == (2, "")
    process = redirected(how, "nonsense")
    assert (process.returncode, process.stdout) == (2, "")


@pytest.mark.parametrize(
    "arguments", [["run", "hi"], ["run", "--output=-", "hi"], ["run", "--help"], ["--help"]]
)
def test_a_full_stdout_is_said(redirected, arguments):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    title = "jaxserve run" if arguments[0] == "run" else "jaxserve"
    process = redirected("> /dev/full", *arguments)
    check_error(process, f"{title}: cannot write stdout: No space left on device")


def test_stdout_that_is_the_input_is_refused(redirected, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a", "max_tokens": 1}])
    for given in (f"--input={source}", "--input=-"):
        process = redirected(f'< "{source}" >> "{source}"', "run", given)
        check_error(process, "jaxserve run: stdout is the input itself")
        assert source.read_text() == json.dumps({"prompt": "a", "max_tokens": 1}) + "\n"
