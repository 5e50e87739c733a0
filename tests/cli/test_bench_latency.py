"""`jaxserve bench latency` over the fake engine, and the profile of a real (tiny) model's step."""

import json

import pytest

from jaxserve.cli import bench_latency
from jaxserve.cli.arguments import UsageError
from jaxserve.cli.bench_arm import Timeline
from jaxserve.cli.main import main
from tests.cli.test_bench_offline import FakeCounter
from tests.llms import shared_llm


@pytest.fixture
def command(made, model, monkeypatch):
    monkeypatch.setattr(bench_latency, "make_compile_counter", FakeCounter)
    return ["bench", "latency", f"--model={model}"]


def test_figures_of_a_batch(command, tmp_path, capsys):
    output = tmp_path / "result.json"
    flags = ["--batch_size=3", "--input_len=9", "--output_len=5", "--repetitions=2"]
    assert main([*command, *flags, f"--output={output}"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert json.loads(output.read_text()) == result
    assert (result["batch_size"], result["input_len"], result["output_len"]) == (3, 9, 5)
    assert (result["num_repetitions"], result["jaxserve_version"]) == (2, "0.1.0")
    for name in ("ttft_s", "itl_s", "tpot_s", "e2el_s"):
        assert 0 < result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"]
    # 15 tokens come between the start of a batch and its end, which is when the last request ends
    assert result["output_tokens_per_s"] > 0
    assert result["ttft_s"]["p99"] < result["e2el_s"]["p50"]
    assert (
        result["compiles_after_warmup"] == 3
    )  # one for each replay, the one that is not counted too
    assert "profile" not in result


def test_a_batch_that_does_not_fit_the_context_is_refused(command, capsys):
    assert main([*command, "--input_len=100", "--output_len=29", "--max_model_len=128"]) == 2
    err = capsys.readouterr().err
    assert "--input_len=100 and --output_len=29 make 129 tokens, more than max_model_len=128" in err


def test_time_per_output_token_leaves_the_first_out():
    one = Timeline(token_ids=[1, 2, 3, 4, 5], release_s=[10.0, 11.0, 14.0])  # two came together
    assert bench_latency.time_per_output_token_s(one) == 1.0


def test_batches_share_no_prefix_and_are_the_same_in_every_run():
    lines = bench_latency.make_batch(4, 8, 3)
    prompts = [tuple(line.prompt) for line in lines]
    assert len(set(prompts)) == 4
    assert {len(prompt) for prompt in prompts} == {8}
    assert bench_latency.make_batch(4, 8, 3) == lines
    assert all(line.params.max_tokens == 3 and line.params.ignore_eos for line in lines)


def test_profile_names_each_program_of_a_step_and_leaves_the_engine_as_it_was():
    llm = shared_llm()
    found = bench_latency.profile(llm, bench_latency.make_batch(2, 8, 12))
    programs = found["programs"]
    weights = sum(one["bytes_per_call"] * one["calls_per_step"] for one in programs.values())
    assert found["bytes_per_step"] == weights > 0
    assert found["num_steps"] >= 4
    assert 16 < found["num_context_tokens"] < 40
    assert any(name.startswith("layers/") for name in programs)
    assert min(one["calls_per_step"] for one in programs.values()) == 1
    assert found["ms_per_step"] == pytest.approx(sum(p["ms_per_step"] for p in programs.values()))
    assert all(one["median_ms"] > 0 and one["of_ceiling"] >= 0 for one in programs.values())
    assert not llm.engine.has_work()


def test_profile_of_nothing_is_refused():
    with pytest.raises(UsageError, match="no step was seen in which all requests decode"):
        bench_latency.profile(shared_llm(), bench_latency.make_batch(1, 8, 2))


def test_a_profile_of_too_few_tokens_is_refused_before_anything_is_measured(command, made, capsys):
    assert main([*command, "--profile", "--output_len=10", "--num_decode_steps=4"]) == 2
    assert "--output_len=10: --profile needs at least 11" in capsys.readouterr().err
    assert not made


def test_a_profile_ends_where_a_request_fails_without_a_token(monkeypatch):
    llm = shared_llm()
    step = llm.step

    def step_and_fail():
        llm.engine.abort("0")
        return step()

    monkeypatch.setattr(llm, "step", step_and_fail)
    with pytest.raises(UsageError, match="no step was seen in which all requests decode"):
        bench_latency.profile(llm, bench_latency.make_batch(2, 8, 12))
    assert not llm.engine.has_work()
