"""`jaxserve fetch` as typed: exit codes, one line on stderr, where things go."""

from pathlib import Path

import pytest

from jaxserve.cli.main import main
from tests.checkpoints import make_random_llama


def test_already_there_is_exit_0(tmp_path, capsys):
    make_random_llama(tmp_path / "smollm2-135m-instruct")
    assert main(["fetch", "smollm2-135m-instruct", f"--dest={tmp_path}"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"smollm2-135m-instruct is already there: {tmp_path / 'smollm2-135m-instruct'}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            "give the name of a checkpoint: qwen2.5-coder-0.5b-instruct, smollm2-135m-instruct",
        ),
        (
            ["nothing"],
            "jaxserve fetch: no checkpoint is called 'nothing'; known: qwen2.5-coder-0.5b-instruct, smollm2",
        ),
        (
            ["../x"],
            "jaxserve fetch: checkpoint must be a NAME or 'org/name' on the hub, got '../x'",
        ),
        (["smolm2-135M-instruct"], "did you mean 'smollm2-135m-instruct'?"),
        (["--destt=x", "a"], "did you mean --dest?"),
    ],
)
def test_failures_are_exit_2_and_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["fetch", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_help_lists_the_names(capsys):
    assert main(["fetch", "--help"]) == 0
    out = capsys.readouterr().out
    assert "smollm2-135m-instruct" in out
    assert "--dest" in out
    assert "--max_num_seqs" not in out
    assert out.startswith("usage: jaxserve fetch ")
    assert "exit code: 0 " in out
    assert out.count("--flagfile") == 1
    assert "undefok" not in out


def test_destination_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert main(["fetch", "smollm2-135m-instruct", f"--dest={tmp_path / 'file' / 'sub'}"]) == 2
    err = capsys.readouterr().err
    assert "cannot write" in err
    assert str(Path(tmp_path / "file")) in err
