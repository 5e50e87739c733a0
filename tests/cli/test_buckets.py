"""`jaxserve buckets`: from a log to flags that an engine takes."""

import re

import pytest

from jaxserve.cli.main import main
from jaxserve.config import SchedulerConfig
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.schedule.replay import ScheduleLog
from jaxserve.schedule.schedule_log import LogHeader, ScheduleLogWriter
from tests.fakes import drain, make_engine


def write_log(path, **options):
    """Three prompts of nine tokens, decoded together for five steps."""
    engine = make_engine(**options)
    with path.open("w") as file:
        header = LogHeader.of(engine.stats(), version="0")
        writer = ScheduleLogWriter(file.write, header)
        engine.observers.append(writer)
        for i in range(3):
            params = SamplingParams(max_tokens=6)
            engine.add(Request(id=f"r{i}", prompt_token_ids=[5 + i] * 9, sampling_params=params))
        drain(engine)
        writer.close()
    return path


def flags_of(out: str) -> dict[str, tuple[int, ...]]:
    found = re.findall(r"^--(token_buckets|row_buckets)=([\d,]+)$", out, flags=re.M)
    return {name: tuple(map(int, rungs.split(","))) for name, rungs in found}


def test_a_proposal_is_taken_by_an_engine_and_pads_less(tmp_path, capsys):
    path = write_log(tmp_path / "log.jsonl")
    assert main(["buckets", f"--schedule_log={path}", "--num_token_buckets=3"]) == 0
    out = capsys.readouterr().out
    assert "6 steps" in out
    ladders = flags_of(out)
    assert ladders == {"token_buckets": (3, 27, 32), "row_buckets": (3, 8)}
    again = write_log(tmp_path / "again.jsonl", **ladders)
    steps = list(ScheduleLog(again.read_bytes().splitlines(keepends=True)).steps())
    assert [step.plan.num_padding_tokens for step in steps] == [0] * 6
    # The log of an engine with ladders of its own can be read back, and says the same.
    assert main(["buckets", f"--schedule_log={again}"]) == 0
    assert flags_of(capsys.readouterr().out) == ladders


def test_a_cost_leaves_rungs_out(tmp_path, capsys):
    path = write_log(tmp_path / "log.jsonl")
    assert main(["buckets", f"--schedule_log={path}", "--bucket_cost=6"]) == 0
    assert flags_of(capsys.readouterr().out)["token_buckets"] == (3, 32)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--schedule_log is needed"),
        (["--schedule_log=/no/such"], "cannot read --schedule_log=/no/such"),
        (
            ["--schedule_log=LOG", "--num_row_buckets=0"],
            "num_row_buckets must be at least 1, got 0",
        ),
        (["--schedule_log=LOG", "--bucket_cost=-1"], "bucket_cost must be at least 0, got -1"),
        (["--schedule_log=LOG", "more"], "unexpected argument 'more'"),
        (["--schedule_log=EMPTY"], "holds no step"),
        (["--schedule_log=BROKEN"], "BROKEN, line 1"),
    ],
)
def test_what_is_at_fault_is_said(tmp_path, capsys, arguments, words):
    lines = write_log(tmp_path / "LOG").read_text().splitlines(keepends=True)
    (tmp_path / "EMPTY").write_text(lines[0])
    (tmp_path / "BROKEN").write_text("{}\n")
    placed = [re.sub("(LOG|EMPTY|BROKEN)", rf"{tmp_path}/\1", one) for one in arguments]
    assert main(["buckets", *placed]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        {"token_buckets": ()},
        {"token_buckets": (4, 4, 512)},
        {"token_buckets": (8, 4, 512)},
        {"token_buckets": (0, 512)},
        {"token_buckets": (4, 256)},
        {"token_buckets": (4.5, 512)},
        {"token_buckets": "512"},
        {"row_buckets": (1, 64)},
        {"row_buckets": (1, 32), "max_num_batched_tokens": 16},
    ],
)
def test_ladders_that_do_not_climb_to_the_limit_are_refused(options):
    name = next(iter(options))
    with pytest.raises(ValueError, match=rf"{name} must be ascending .* end with max_num_"):
        SchedulerConfig(**options)


def test_a_ladder_ends_with_the_smaller_limit():
    config = SchedulerConfig(row_buckets=[1, 16], max_num_batched_tokens=16)
    assert config.row_buckets == (1, 16)
