import pytest

from jaxserve.cli import parallel_flags
from jaxserve.cli.main import main
from jaxserve.cli.run import run_flags
from jaxserve.cli.serve import serve_flags


@pytest.mark.parametrize("make", [run_flags, serve_flags], ids=["run", "serve"])
def test_run_and_serve_have_them(make):
    values = make()
    given = values.flag_values_dict()
    assert {given[name] for name in parallel_flags.PARALLEL_OPTIONS} == {1, None, 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_processes=2"], "num_processes=2 needs coordinator_address"),
        (["--process_id=1"], "process_id must be less than num_processes, 1, got 1"),
        (
            ["--num_processes=2", "--coordinator_address=here"],
            "coordinator_address must be host:port",
        ),
        (["--data_parallel_size=0"], "data_parallel_size must be an integer in [1, "),
    ],
)
def test_values_that_fit_no_run_are_refused_before_anything_is_loaded(arguments, message, capsys):
    assert main(["run", "--model=checkpoints/tiny_llama", *arguments, "Hello"]) == 2
    assert message in capsys.readouterr().err


def test_a_start_that_fails_does_not_wait_for_the_others(monkeypatch):
    registered = []
    monkeypatch.setattr(parallel_flags.atexit, "register", registered.append)
    for count in (1, 2):
        with (
            pytest.raises(ValueError, match="no"),
            parallel_flags.joining({"num_processes": count}),
        ):
            raise ValueError("no")
    with parallel_flags.joining({"num_processes": 2}):
        pass
    (leave,) = registered
    ended = []
    monkeypatch.setattr(parallel_flags.os, "_exit", ended.append)
    leave()
    assert ended == [2]


class Lost:
    """An `LLM` one of whose processes is gone."""

    def close(self) -> str | None:
        return "process 1 of 2 is gone"


def test_a_leader_that_has_lost_a_process_ends_at_once(monkeypatch, capsys):
    ended, registered = [], []
    monkeypatch.setattr(parallel_flags.atexit, "register", registered.append)
    monkeypatch.setattr(parallel_flags.os, "_exit", ended.append)
    parallel_flags.end_others_at_exit(Lost())
    (end,) = registered
    assert not ended
    end()
    assert ended == [2]
    assert "process 1 of 2 is gone" in capsys.readouterr().err
