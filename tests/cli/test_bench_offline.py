"""`jaxserve bench offline` over the fake engine: the figures add up."""

import json
import re
from pathlib import Path

import pytest

from jaxserve.cli import bench_offline
from jaxserve.cli.bench_arm import salted
from jaxserve.cli.main import main
from jaxserve.cli.request_line import RequestLine
from tests.cli.conftest import read_records
from tests.cli.fake_llm import encode
from tests.cli.test_run import write_lines
from tests.fakes import expected_tokens

LINES = [
    {
        "id": f"w{i}",
        "prompt": f"prompt {i}",
        "max_tokens": 4 + i,
        "temperature": 0,
        "ignore_eos": True,
    }
    for i in range(6)
]
NUM_OUTPUT_TOKENS = sum(line["max_tokens"] for line in LINES)
NUM_PROMPT_TOKENS = sum(len(line["prompt"]) for line in LINES)


class FakeCounter:
    """A compile a look: each replay looks twice, so it counts as one."""

    def __init__(self) -> None:
        self._count = 0

    @property
    def count(self) -> int:
        self._count += 1
        return self._count


@pytest.fixture
def measure(made, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_offline, "make_compile_counter", FakeCounter)
    workload = write_lines(tmp_path / "w.jsonl", LINES)

    def run_bench(*arguments: str) -> dict:
        command = ["bench", "offline", f"--model={model}", f"--workload={workload}", *arguments]
        assert main(command) == 0
        return json.loads(capsys.readouterr().out)

    return run_bench


def check_arm(arm: dict, repetitions: int) -> None:
    assert arm["num_output_tokens"] == NUM_OUTPUT_TOKENS
    assert arm["num_prompt_tokens"] == NUM_PROMPT_TOKENS
    assert len(arm["wall_s_each"]) == repetitions
    assert min(arm["wall_s_each"]) <= arm["wall_s"] <= max(arm["wall_s_each"])
    rates = [NUM_OUTPUT_TOKENS / wall for wall in arm["wall_s_each"]]
    assert min(rates) * 0.9999 <= arm["output_tokens_per_s"] <= max(rates) * 1.0001
    assert arm["total_tokens_per_s"] > arm["output_tokens_per_s"]
    for name in ("ttft_s", "itl_s", "e2el_s"):
        figures = arm[name]
        assert 0 < figures["p50"] <= figures["p90"] <= figures["p99"]
        assert figures["mean"] > 0
    assert arm["ttft_s"]["p50"] < arm["e2el_s"]["p50"] <= max(arm["wall_s_each"])
    assert 0 <= arm["padding_waste"] < 1
    assert arm["compiles_after_warmup"] == repetitions
    assert arm["startup"] == {"load_s": 0.1, "compile_s": 0.2, "warm_s": 0.3}
    assert arm["engine"]["attention_backend"] == "fake"
    assert arm["engine"]["kv_cache_dtype"] == "int64"


def test_one_arm(measure, tmp_path):
    output, outputs = tmp_path / "result.json", tmp_path / "outputs.jsonl"
    result = measure("--repetitions=3", f"--output={output}", f"--outputs={outputs}")
    check_arm(result, 3)
    assert result["num_requests"] == 6
    assert result["num_repetitions"] == 3
    assert result["engine"]["scheduling"] == "continuous"
    assert result["peak_rss_bytes"] > 10**6
    assert json.loads(output.read_text()) == result
    numbers = re.findall(r"\d+\.\d+(?:e-?\d+)?", output.read_text())
    assert len(numbers) > 10
    assert all(len(x.partition("e")[0].replace(".", "").lstrip("0")) <= 6 for x in numbers), numbers
    for line, record in zip(LINES, read_records(outputs), strict=True):
        assert record == {
            "id": line["id"],
            "output_ids": expected_tokens(encode(line["prompt"]), line["max_tokens"]),
            "logprobs": [-1.0] * line["max_tokens"],
        }


def test_each_repetition_is_said_on_stderr(made, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_offline, "make_compile_counter", FakeCounter)
    workload = write_lines(tmp_path / "w.jsonl", LINES)
    flags = ["--repetitions=2", "--scheduling=static,continuous"]
    assert main(["bench", "offline", f"--model={model}", f"--workload={workload}", *flags]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("repetition")]
    assert [line.partition(":")[0] for line in said] == [
        "repetition 1 of 2, static",
        "repetition 1 of 2, continuous",
        "repetition 2 of 2, static",
        "repetition 2 of 2, continuous",
    ]
    assert f"{NUM_OUTPUT_TOKENS} output tokens in " in said[0]


def test_both_arms_in_turns(measure, made):
    # A step that runs behind its result would be counted too: steps are compared one at a time.
    result = measure(
        "--repetitions=2",
        "--scheduling=static,continuous",
        "--max-num-seqs=5",
        "--no-async-scheduling",
    )
    assert list(result["arms"]) == ["static", "continuous"]
    for name, arm in result["arms"].items():
        check_arm(arm, 2)
        assert arm["engine"]["scheduling"] == name
    assert len(made) == 2
    assert result["arms"]["static"]["num_steps"] > result["arms"]["continuous"]["num_steps"]


def test_no_repetition_finds_what_an_earlier_one_computed(measure):
    once, thrice = measure(), measure("--repetitions=3")
    assert thrice["num_steps"] == 3 * once["num_steps"]
    off = measure("--repetitions=3", "--noenable_prefix_caching")
    assert (off["num_cached_tokens"], once["num_cached_tokens"] > 0) == (0, True)


def test_salts_keep_replays_apart_and_lines_together():
    lines = [RequestLine(index=i, cache_salt=salt) for i, salt in enumerate((None, None, "s", ""))]
    salts = [[one.cache_salt for one in salted(lines, number)] for number in (1, 2)]
    assert salts[0][0] == salts[0][1] != salts[0][2]
    assert set(salts[0]) & set(salts[1]) == {""}  # no salt at all, which the engine refuses
    alone = [one.cache_salt for one in salted(lines, 1, shared=False)]
    assert len(set(alone)) == 4


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ["holds no requests"]),
        ([{"prompt": "a"}, {"prompt": 3}], ["line 2: prompt must be text"]),
        ([{"prompt": "a", "max_tokens": 2}, {"prompt": "x" * 500}], ["workload line 2: "]),
        ([{"prompt": "a"}, {"prompt": "b", "n": 2}], ["line 2: n must be 1, got 2"]),
    ],
)
def test_a_workload_with_a_bad_line_is_refused(
    made, model, tmp_path, monkeypatch, capsys, lines, words
):
    monkeypatch.setattr(bench_offline, "make_compile_counter", FakeCounter)
    workload = write_lines(tmp_path / "w.jsonl", lines)
    assert main(["bench", "offline", f"--model={model}", f"--workload={workload}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(word in captured.err for word in words), captured.err


def test_the_same_arm_twice_is_refused(made, model, tmp_path, capsys):
    workload = write_lines(tmp_path / "w.jsonl", LINES)
    flags = [f"--model={model}", f"--workload={workload}", "--scheduling=static,static"]
    assert main(["bench", "offline", *flags]) == 2
    assert "--scheduling must name different arms" in capsys.readouterr().err
    assert Path(workload).exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--output={workload}"], ["--output=", "is the workload itself"]),
        (["--outputs={workload}"], ["--outputs=", "is the workload itself"]),
        (["--output=o", "--outputs=./o"], ["--output and --outputs are the same file"]),
        (["--workload=/no/such"], ["cannot read --workload=/no/such: No such file"]),
    ],
)
def test_files_that_cannot_be_what_they_are_asked_to_be(
    made, model, tmp_path, capsys, flags, words
):
    workload = write_lines(tmp_path / "w.jsonl", LINES)
    before = workload.read_bytes()
    given = [flag.format(workload=workload) for flag in flags]
    assert main(["bench", "offline", f"--model={model}", f"--workload={workload}", *given]) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words), err
    assert workload.read_bytes() == before
    assert made == []


@pytest.mark.parametrize("flag", ["output", "outputs", "stats_file", "schedule_log"])
@pytest.mark.parametrize("name", ["folder", "nowhere/x"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    made, model, tmp_path, flag, name, capsys
):
    (tmp_path / "folder").mkdir()
    workload = write_lines(tmp_path / "w.jsonl", LINES)
    command = ["bench", "offline", f"--model={model}", f"--workload={workload}"]
    assert main([*command, f"--{flag}={tmp_path}/{name}"]) == 2
    assert f"cannot write --{flag}={tmp_path}/{name}: " in capsys.readouterr().err
    assert not made
