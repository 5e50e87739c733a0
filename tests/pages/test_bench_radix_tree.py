"""scripts/bench_radix_tree runs and prints a line for each tree and length."""

import runpy
import sys

import pytest


def run(monkeypatch, repository, *flags: str) -> None:
    script = str(repository / "scripts" / "bench_radix_tree")
    monkeypatch.setattr(sys, "argv", [script, *flags])
    runpy.run_path(script, run_name="__main__")


def test_prints_a_line_for_each_arm(monkeypatch, capsys, repository):
    flags = ["--pages=300,600", "--prompt_tokens=512,2048", "--repetitions=2"]
    run(monkeypatch, repository, *flags)
    head, *lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [int(line[head.index("prompt")]) for line in lines] == [512, 2048] * 2
    for line, least in zip(lines, [300, 300, 600, 600], strict=True):
        assert int(line[0]) >= least
        assert all(float(value) > 0 for value in line[1:])


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--pages=0", "--pages=0: expected numbers from 1 up"),
        ("--prompt_tokens=8,x", "--prompt_tokens=8,x: expected numbers from 32 up"),
        ("--repetitions=0", "--repetitions=0: must be at least 1"),
    ],
)
def test_names_the_flag(flag, message, monkeypatch, capsys, repository):
    with pytest.raises(SystemExit):
        run(monkeypatch, repository, flag)
    assert message in capsys.readouterr().err
