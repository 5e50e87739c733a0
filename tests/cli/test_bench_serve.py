"""`jaxserve bench serve` and `bench capacity` against a small server: the flags mean what they say."""

import json
import subprocess
import sys

import pytest

from jaxserve.cli.main import main
from tests.cli.conftest import read_records
from tests.cli.test_run import write_lines
from tests.server.load.sse_server import SseServer, serving


@pytest.fixture(scope="module")
def server():
    return SseServer()


@pytest.fixture(scope="module")
def url(server):
    with serving(server) as url:
        yield url


@pytest.fixture
def bench(url, server, capsys):
    """Runs a command -> (exit code, its result); what was posted stands in server.bodies."""

    def run(kind: str, *flags: str) -> tuple[int, dict]:
        server.bodies.clear()
        code = main(["bench", kind, f"--base_url={url}", "--verbosity=-1", *flags])
        return code, json.loads(capsys.readouterr().out)

    return run


def lines_file(tmp_path, *prompts: str) -> str:
    objects = [{"id": f"l{i}", "prompt": p, "top_k": 5} for i, p in enumerate(prompts)]
    return f"--dataset_path={write_lines(tmp_path / 'd.jsonl', objects)}"


def test_random_prompts(bench, server):
    flags = ["--num_prompts=6", "--input_len=9", "--prefix_len=2", "--output_len=3"]
    code, result = bench("serve", *flags, "--goodput=ttft:60000,e2el:60000", "--percentiles=5,99.9")
    assert code == 0
    assert (result["num_prompts"], result["completed"], result["failed"]) == (6, 6, 0)
    assert (result["model"], result["request_rate"], result["seed"]) == ("tiny", "inf", 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (60, 24)
    assert result["goodput_share"] == 1
    assert result["request_goodput"] == result["request_throughput"]
    assert result["goodput_limits_ms"] == {"ttft": 60000, "e2el": 60000}
    for latency in ("ttft", "tpot", "itl", "e2el"):
        kinds = ("p5", "median", "mean", "p99.9")
        low, middle, _, high = (result[f"{kind}_{latency}_ms"] for kind in kinds)
        assert 0 <= low <= middle <= high
    assert result["client"]["token_counts"] == "usage"
    bodies = server.bodies
    assert len(bodies) == 7  # one of them before the load
    salts = [body["cache_salt"] for body in bodies]
    assert len(set(salts)) == 2
    assert salts[0] not in salts[1:]
    for body in bodies:
        assert (len(body["prompt"]), body["max_tokens"], body["ignore_eos"]) == (11, 3, True)
        assert body["model"] == "tiny"
    assert len({tuple(body["prompt"]) for body in bodies[1:]}) > 1


def test_the_same_seed_sends_the_same_prompts(bench, server):
    sent = []
    for seed in (3, 3, 4):
        bench("serve", "--num_prompts=4", "--input_len=20", f"--seed={seed}", "--nocache_salt")
        sent.append([body["prompt"] for body in server.bodies])
        assert "cache_salt" not in server.bodies[-1]
    assert sent[0] == sent[1] != sent[2]


def test_prefix_repetition_and_chats(bench, server):
    flags = ["--dataset=prefix_repetition", "--num_prompts=8", "--num_prefixes=2", "--input_len=4"]
    code, result = bench("serve", *flags, "--backend=openai-chat", "--prefix_len=30")
    assert (code, result["prefix_len"], result["num_prefixes"]) == (0, 30, 2)
    texts = [body["messages"][0]["content"] for body in server.bodies[1:]]
    assert len({" ".join(text.split()[:32]) for text in texts}) == 2
    assert {len(text.split()) for text in texts} == {36}


def test_a_file_and_its_records(bench, server, tmp_path):
    records, output = tmp_path / "records.jsonl", tmp_path / "result.json"
    path = lines_file(tmp_path, "say 3", "say 1")
    flags = ["--dataset=jsonl", path, f"--records={records}", f"--output={output}"]
    code, result = bench("serve", *flags, '--extra_body={"top_p": 0.5}', "--request_rate=100")
    assert (code, result["num_prompts"], result["dataset_path"]) == (0, 2, "d.jsonl")
    assert json.loads(output.read_text()) == result
    assert [one["num_output_tokens"] for one in read_records(records)] == [6, 2]
    assert read_records(records)[0]["text"] == "alpha beta gamma "
    body = server.bodies[-1]
    assert (body["top_k"], body["top_p"], body["max_tokens"]) == (5, 0.5, 64)
    assert bench("serve", *flags, "--num_prompts=5")[1]["num_prompts"] == 5


def test_failures_are_counted_and_are_no_latency(bench, tmp_path):
    path = lines_file(tmp_path, "say 2", "status 429", "cut 1", "status 429", "slow 2 5")
    code, result = bench("serve", "--dataset=jsonl", path, "--goodput=e2el:60000")
    assert code == 1
    assert (result["completed"], result["failed"]) == (2, 3)
    assert result["failures"] == {"cut": 1, "http_429": 2}
    assert result["goodput_share"] == pytest.approx(0.4)


def test_concurrency_is_bounded(bench, tmp_path):
    path = lines_file(tmp_path, *["slow 2 20"] * 4)
    _, result = bench("serve", "--dataset=jsonl", path, "--max_concurrency=1")
    assert result["duration"] >= 4 * 0.04
    assert result["median_e2el_ms"] < 1000 * result["duration"] / 2


def test_the_key_comes_from_a_file(tmp_path, capsys):
    keys = tmp_path / "keys"
    keys.write_text("# ours\n\n  k-1 \nk-2\n")
    with serving(SseServer(api_key="k-1")) as url:
        flags = [f"--base_url={url}", "--num_prompts=2", "--verbosity=-1"]
        assert main(["bench", "serve", *flags, f"--api_key_file={keys}"]) == 0
        assert "k-1" not in capsys.readouterr().out
        assert main(["bench", "serve", *flags]) == 2
        assert "/v1/models: status 401: no key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "flags", "words"),
    [
        ("serve", ["--base_url=127.0.0.1:1"], "--base_url=127.0.0.1:1: must be http://"),
        ("serve", ["--request_rate=0"], "--request_rate=0.0: must be above 0"),
        ("serve", ["--request_rate=nan"], "--request_rate=nan: must be above 0"),
        ("serve", ["--num_prompts=0"], "--num_prompts=0: must be at least 1"),
        ("serve", ["--max_concurrency=0"], "--max_concurrency=0: must be at least 1"),
        ("serve", ["--range_ratio=1"], "--range_ratio=1.0: must be in [0, 1)"),
        ("serve", ["--burstiness=0"], "--burstiness=0.0: must be above 0"),
        ("serve", ["--prefix_len=-1"], "--prefix_len=-1: must be at least 0"),
        ("serve", ["--goodput=itl:5"], "--goodput=itl:5: must be ttft, tpot, e2el with"),
        ("serve", ["--goodput=ttft:-5"], "--goodput=ttft:-5: must be"),
        ("serve", ["--percentiles=101"], "--percentiles=101: must be numbers in [0, 100]"),
        ("serve", ["--dataset=jsonl"], "--dataset_path is needed"),
        ("serve", ["--dataset_path=x"], "--dataset_path is for --dataset=jsonl"),
        ("serve", ["--dataset=jsonl", "--dataset_path=/no/such"], "cannot read --dataset_path"),
        ("serve", ["--api_key_file=/no/such"], "cannot read --api_key_file=/no/such"),
        ("serve", ["--extra_body=[]"], "--extra_body=[]: must be a JSON object"),
        ("serve", ["--backend=grpc"], "--backend=grpc"),
        ("serve", ["--output=/no/such/x"], "cannot write --output=/no/such/x"),
        ("serve", ["--records=/no/such/x"], "cannot write --records=/no/such/x"),
        ("capacity", [], "--slo is needed"),
        ("capacity", ["--slo=ttft:5"], "--slo=ttft:5: must name mean, median or a percentile"),
        ("capacity", ["--slo=p99_ttft:5", "--tolerance=0"], "--tolerance=0.0: must be"),
        ("capacity", ["--slo=p99_ttft:5", "--warmup_share=1"], "--warmup_share=1.0: must be in"),
        ("capacity", ["--slo=p99_ttft:5", "--max_rate=0.01"], "at least --min_rate"),
    ],
)
def test_bad_flags_are_refused_before_the_server_hears_of_us(kind, flags, words, capsys):
    assert main(["bench", kind, *flags]) == 2
    captured = capsys.readouterr()
    assert words in captured.err, captured.err
    assert captured.out == ""


def test_a_server_that_does_not_answer_is_not_measured(bench, url, tmp_path, capsys):
    assert main(["bench", "serve", "--base_url=http://127.0.0.1:1"]) == 2
    assert "cannot connect to http://127.0.0.1:1" in capsys.readouterr().err
    path = lines_file(tmp_path, "status 500")
    assert main(["bench", "serve", f"--base_url={url}", "--dataset=jsonl", path]) == 2
    assert "a request before the load had no answer: http_500: as asked" in capsys.readouterr().err


SEARCH = ("--slo=p99_e2el:10000", "--probe_s=0.2", "--min_prompts=4", "--start_rate=20")


def test_capacity(bench, server):
    code, result = bench("capacity", *SEARCH, "--max_rate=40", "--input_len=4")
    assert code == 0
    assert (result["request_rate"], result["failed_rate"]) == (40, None)
    assert result["ended_by"] == "max_rate"
    assert result["slo"] == {"p99_e2el_ms": 10000}
    assert [one["request_rate"] for one in result["probes"]] == [20, 40]
    assert [one["completed"] for one in result["probes"]] == [4, 8]
    assert all(one["passed"] and not one["broken"] for one in result["probes"])
    bodies = server.bodies
    assert len({body["cache_salt"] for body in bodies}) == 3
    assert bodies[1]["prompt"] != bodies[5]["prompt"]


def test_no_rate_passes(bench, tmp_path):
    path = lines_file(tmp_path, "slow 2 30")
    flags = ["--slo=p50_e2el:20", "--probe_s=0.1", "--min_prompts=2", "--min_rate=10"]
    code, result = bench("capacity", "--dataset=jsonl", path, *flags, "--start_rate=20")
    assert code == 1
    assert (result["request_rate"], result["ended_by"]) == (None, "min_rate")
    assert result["probes"][-1]["broken"][0].startswith("p50_e2el_ms is ")


def test_what_does_not_end_is_cut_off(bench, tmp_path):
    path = lines_file(tmp_path, "say 1", "hang")
    flags = ["--drain_s=0.1", "--max_probes=1", "--min_prompts=4", "--start_rate=50"]
    code, result = bench("capacity", "--dataset=jsonl", path, *SEARCH, *flags)
    assert code == 1
    (probe,) = result["probes"]
    assert probe["failures"] == {"cut_off": 5}
    assert probe["broken"][0].endswith("requests have no answer")


def test_the_client_needs_no_jax():
    code = "import sys, jaxserve.cli.bench_serve, jaxserve.cli.bench_capacity\n"
    code += "print([name for name in ('jax', 'httpx', 'starlette') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
