"""No file of a run destroys what the run reads."""

import os
from pathlib import Path

import pytest

from jaxserve.cli.arguments import UsageError
from jaxserve.cli.output_files import check_output_file
from tests.cli.test_run import write_lines

SIDE_FILES = [
    "z.partial.jsonl",
    "z.partial.jsonl.tmp",
    "z.meta.json",
    "z.meta.json.tmp",
]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("name", SIDE_FILES)
@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_a_side_file_that_is_the_input_is_refused(run, made, tmp_path, capsys, name, link):
    source = write_lines(tmp_path / name, [{"prompt": "a"}])
    if link is not None:
        link(source, tmp_path / "in.jsonl")
        source = tmp_path / "in.jsonl"
    before = content(tmp_path)
    for extra in ([], ["--overwrite"], ["--resume"]):
        assert run(f"--input={source}", f"--output={tmp_path}/z", *extra) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert f"/{name}, and that is the input: give another --output" in err
    assert content(tmp_path) == before
    assert made == []


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_the_input_by_another_name_is_refused(run, tmp_path, capsys, link):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    link(source, tmp_path / "out.jsonl")
    before = content(tmp_path)
    assert run(f"--input={source}", f"--output={tmp_path}/out.jsonl", "--overwrite") == 2
    assert "out.jsonl is the input itself" in capsys.readouterr().err
    assert content(tmp_path) == before


def test_stdin_from_the_output_is_refused(tmp_path, monkeypatch):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    with open(source, "rb") as stream:
        monkeypatch.setattr("jaxserve.cli.output_files._STDIN", stream.fileno())
        with pytest.raises(UsageError, match="is the input itself"):
            check_output_file(source, "-")
        check_output_file(tmp_path / "other", "-")


def test_a_path_that_cannot_be_is_refused(run, made, capsys):
    assert run(f"--output=/{'x' * 5000}/o", "hello") == 2
    assert "not a file in an existing directory" in capsys.readouterr().err


@pytest.mark.parametrize("num_bytes", [250, 300])
def test_a_name_too_long_for_its_side_files_is_refused(run, made, tmp_path, capsys, num_bytes):
    limit = os.pathconf(tmp_path, "PC_NAME_MAX") - len(".partial.jsonl.tmp")
    output = tmp_path / ("é" * (num_bytes // 2))
    assert run(f"--output={output}", "hello") == 2
    err = capsys.readouterr().err
    assert f"its name is {num_bytes} bytes long, the limit here is {limit} (" in err
    assert err.count("\n") == 1
    assert made == []
    check_output_file(tmp_path / ("x" * limit), None)
    with pytest.raises(UsageError):
        check_output_file(tmp_path / ("x" * (limit + 1)), None)
