"""scripts/setup in a folder of its own, with interpreters that only pretend to be."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# Stands in for an interpreter: answers the version check, "makes" a venv, "installs" by noting it.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$1 $2" in
  "-c import pip") exit 0 ;;
  "-c "*) {version_check} ;;
  "-m venv") mkdir -p "$3/bin"; cp "${{BASH_SOURCE[0]}}" "$3/bin/python"; exit {venv_status} ;;
  "-m pip") exit {pip_status} ;;
esac
"""


@pytest.fixture
def project(tmp_path, repository) -> Path:
    """A checkout with nothing but pyproject.toml and scripts/setup, and a PATH without any Python."""
    root = tmp_path / "a check out"
    for folder in (root / "scripts", root / "bin", root / "home"):
        folder.mkdir(parents=True)
    shutil.copy(repository / "scripts" / "setup", root / "scripts" / "setup")
    (root / "pyproject.toml").write_text("[project]\n")
    tools = "bash env dirname readlink sed tr sort paste cat cmp rm mkdir cp flock"
    for tool in tools.split():
        found = shutil.which(tool)
        if found:
            (root / "bin" / tool).symlink_to(found)
    return root


def add_python(path: Path, version: str | None, *, venv_status: int = 0, pip_status: int = 0):
    check = f"echo {version}" if version else "exit 1"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = FAKE_PYTHON.format(version_check=check, venv_status=venv_status, pip_status=pip_status)
    path.write_text(text)
    path.chmod(0o755)


def setup(project: Path, *arguments: str, script: Path | None = None, cwd: Path | None = None):
    """Run it; returns (exit status, stderr, what the interpreters were asked)."""
    calls = project / "calls"
    calls.write_text("")
    environment = {
        "PATH": str(project / "bin"),
        "HOME": str(project / "home"),
        "CALLS": str(calls),
    }
    done = subprocess.run(
        [script or project / "scripts" / "setup", *arguments],
        env=environment,
        cwd=cwd or project,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stderr, calls.read_text()


def test_without_a_python_it_says_what_to_install(project):
    add_python(project / "bin" / "python3", None)  # too old, or without venv
    status, errors, calls = setup(project)
    assert status == 2
    assert "no Python >= 3.12" in errors
    assert "pyenv install 3.12" in errors
    assert "-m venv" not in calls
    assert not (project / ".venv").exists()


def test_second_call_does_nothing(project):
    add_python(project / "bin" / "python3.12", "3.12")
    status, errors, calls = setup(project)
    assert (status, "pip install" in calls) == (0, True), errors
    assert f"{project}[test]" in calls
    assert setup(project) == (0, "", "")
    assert setup(project, "test") == (0, "", "")


def test_changed_project_and_new_extras_are_installed_in_place(project):
    add_python(project / "bin" / "python3.12", "3.12")
    setup(project)
    (project / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    _, _, calls = setup(project)
    assert "pip install" in calls
    assert "-m venv" not in calls
    _, _, calls = setup(project, "dev")
    assert f"{project}[dev,test]" in calls
    assert setup(project, "test") == (0, "", "")


@pytest.mark.parametrize("failure", [{"venv_status": 1}, {"pip_status": 1}])
def test_interrupted_call_is_made_good(project, failure):
    python = project / "bin" / "python3.12"
    add_python(python, "3.12", **failure)
    assert setup(project)[0] == 1
    leftover = project / ".venv" / "half-made"
    leftover.touch()
    add_python(python, "3.12")
    status, errors, calls = setup(project)
    assert status == 0
    assert "building it anew" in errors
    assert "-m venv" in calls
    assert not leftover.exists()


def test_environment_of_the_user_is_kept(project):
    add_python(project / "bin" / "python3.12", "3.12")
    add_python(project / ".venv" / "bin" / "python", "3.12")
    (project / ".venv" / "mine").touch()
    status, _, calls = setup(project)
    assert status == 0
    assert "-m venv" not in calls
    assert (project / ".venv" / "mine").exists()


def test_environment_that_lost_its_interpreter_is_rebuilt(project):
    add_python(project / "bin" / "python3.12", "3.12")
    setup(project)
    (project / ".venv" / "bin" / "python").unlink()
    status, _, calls = setup(project)
    assert status == 0
    assert "-m venv" in calls


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"bin/python3": None, "bin/python3.12": "3.12"}, "bin/python3.12"),
        ({"bin/python3": "3.14", "bin/python3.13": "3.13"}, "bin/python3.13"),
        ({"bin/python3": "3.14"}, "bin/python3"),
        (
            {"bin/python3": None, "home/.pyenv/versions/3.12.1/bin/python": "3.12"},
            "home/.pyenv/versions/3.12.1/bin/python",
        ),
        # A shim that is there but answers nothing, as pyenv's are for versions that are not active.
        (
            {"bin/python3.12": None, "home/.pyenv/versions/3.13.0/bin/python": "3.13"},
            "home/.pyenv/versions/3.13.0/bin/python",
        ),
    ],
)
def test_which_python_is_taken(project, pythons, chosen):
    for path, version in pythons.items():
        add_python(project / path, version)
    status, errors, _ = setup(project)
    assert status == 0
    assert f"with {project / chosen}\n" in errors


def test_python_that_only_uv_knows(project):
    add_python(project / "elsewhere" / "python", "3.12")
    uv = project / "bin" / "uv"
    uv.write_text(f'#!/usr/bin/env bash\necho "{project}/elsewhere/python"\n')
    uv.chmod(0o755)
    status, errors, _ = setup(project)
    assert status == 0
    assert "elsewhere/python" in errors


def test_works_through_a_symlink_and_from_anywhere(project, tmp_path):
    add_python(project / "bin" / "python3.12", "3.12")
    link = tmp_path / "link"
    link.symlink_to(os.path.relpath(project / "scripts" / "setup", tmp_path))
    status, _, _ = setup(project, script=link, cwd=tmp_path)
    assert status == 0
    assert (project / ".venv" / "bin" / "python").exists()


def test_bad_arguments_are_refused(project):
    assert setup(project, "--help")[0] == 2
    assert setup(project, "test", "dev")[0] == 2
