"""`jaxserve simulate`: one JSON object or a table, and every mistake a line and exit code 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.cli.main import main
from jaxserve.cli.model_shapes import find_model
from jaxserve.cli.simulate import simulate_flags, simulation_config
from jaxserve.config import SchedulerConfig

REPOSITORY = Path(__file__).parent.parent.parent
DATA = REPOSITORY / "tests" / "plan" / "data"
CONVERSATION = ["--format=mooncake", f"--trace={DATA / 'mooncake_conversation.jsonl'}"]
MACHINE = ["--model=llama-3-8b", "--chip=h100"]
KEYS = {
    "block_hit_rate",
    "token_hit_rate",
    "kv_utilisation",
    "output_tokens_per_s",
    "ttft_s",
    "itl_s",
    "e2el_s",
    "num_preemptions",
    "num_steps",
    "num_requests",
    "num_prefix_waits",
    "num_pages",
    "simulated_s",
    "wall_s",
}


@pytest.fixture
def run_json(capsys):
    def run(*arguments: str) -> dict:
        code = main(
            ["simulate", *CONVERSATION, *MACHINE, "--json", "--max_requests=20", *arguments]
        )
        out = capsys.readouterr().out
        assert code == 0
        return json.loads(out)

    return run


def test_the_json_object(run_json):
    record = run_json()
    assert record.keys() >= KEYS
    assert record["num_requests"] == 20
    for name in ("ttft_s", "itl_s", "e2el_s"):
        assert list(record[name]) == ["p50", "p95", "p99", "max"]
        assert sorted(record[name].values()) == list(record[name].values())
    assert 0 < record["block_hit_rate"] < 1
    assert 0.9 < record["kv_utilisation"] <= 1
    settings = record["settings"]
    assert (settings["model"], settings["chip"], settings["max_requests"]) == (
        "llama-3-8b",
        "h100",
        20,
    )
    assert not settings.keys() & {"help", "verbosity", "flagfile"}


def test_the_table(capsys):
    assert (
        main(["simulate", *CONVERSATION, *MACHINE, "--max_requests=5", "--num_pages=unlimited"])
        == 0
    )
    captured = capsys.readouterr()
    lines = dict(line.split(maxsplit=1) for line in captured.out.splitlines())
    assert (lines["model"], lines["admission"], lines["allocator"]) == (
        "llama-3-8b",
        "fcfs",
        "paged",
    )
    assert lines["num_requests"] == "5"
    assert lines["block_hit_rate"].endswith("%")
    assert lines["num_pages"] == "unlimited"
    assert lines["ttft_s"].startswith("p50 ")
    assert "5 requests" in captured.err


def test_a_fetched_name_and_a_folder_are_models_too():
    by_folder = find_model(str(REPOSITORY / "checkpoints" / "tiny_llama"))
    assert find_model("tiny_llama") == by_folder
    assert by_folder.num_layers == 2


def test_the_azure_format(capsys):
    trace = [f"--trace={DATA / 'azure_code.csv'}", "--format=azure"]
    assert main(["simulate", *trace, *MACHINE]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["num_requests"] == "100"
    assert lines["block_hit_rate"] == "-"


def test_arms_reach_the_scheduler(run_json):
    plain = run_json()
    assert run_json("--noenable_prefix_caching")["token_hit_rate"] == 0
    assert run_json("--nochunked_prefill")["num_steps"] < plain["num_steps"]
    assert run_json("--scheduling=static", "--max_num_seqs=4")["num_running_most"] <= 4
    contiguous = run_json("--allocator=contiguous_max")
    assert contiguous["kv_utilisation"] < 0.5
    assert contiguous["token_hit_rate"] == 0
    faster = run_json("--rate_scale=2", "--num_chips=2")
    assert faster["simulated_s"] < plain["simulated_s"]
    sequential = run_json("--arrivals=sequential", "--page_size=512", "--num_pages=unlimited")
    assert sequential["num_running_most"] == 1
    assert sequential["num_output_tokens"] == 20
    assert sequential["num_pages"] is None


def test_a_model_by_its_folder(run_json):
    record = run_json(f"--model={REPOSITORY / 'checkpoints' / 'tiny_llama'}", "--chip=cpu")
    assert record["simulated_s"] < 60


def test_defaults_are_the_engine_s_but_for_the_limits():
    values = simulate_flags()
    values(["jaxserve", "--model=llama-3-8b", "--chip=h100"])
    config = simulation_config(values.flag_values_dict())
    assert config.scheduler == SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048)
    assert config.cache.enable_prefix_caching
    assert config.page_size == 16


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--chip=b200"], "--chip=b200: value should be one of"),
        (["--format=csv"], "--format=csv: value should be one of"),
        (["--model=llama"], "--model=llama: neither a folder with a config.json, nor fetched, nor"),
        (["--model=llama3-8b"], "did you mean llama-3-8b?"),
        (["--arrivals=sequential", "--rate_scale=3"], "rate_scale needs timed arrivals"),
        (["--num_pages=many"], '--num_pages=many: must be an integer, "unlimited" or "auto"'),
        (["--num_pages=1"], "num_pages must be an integer in [2,"),
        (["--num_pages=20"], "num_pages 20 is too small: a request of"),
        (["--page_size=24"], "page_size must be a power of two, got 24"),
        (["--max_requests=0"], "--max_requests=0"),
        (["--max_requests=99999999999999999999"], "not an integer in the range [1, 2147483647]"),
        (["--max_num_seqs=0"], "max_num_seqs must be an integer in [1,"),
        (["--max_model_len=100"], "max_model_len 100 is too small"),
        (["--num_chips=3"], "num_chips must divide the model's 32 query heads, got 3"),
        (["--rate_scale=0"], "rate_scale must be a number > 0, got 0.0"),
        (["--rate_scale=fast"], "--rate_scale=fast: must be a number"),
        (["--chip=v5e"], "hold no page of 16 tokens beside 16.06 GB of weights"),
        (["--preemption_mode=swap"], "set host_kv_gib"),
        (
            ["--allocator=contiguous_max", "--enable_prefix_caching"],
            "allocator 'contiguous_max' shares nothing",
        ),
        (["--nochunked_prefill", "--target_itl_s=0.1"], "chunked_prefill must be True"),
        (["--chunks"], "unknown flag '--chunks'"),
        (["more"], "unexpected argument 'more'"),
        (["--trace=none.jsonl"], "cannot read none.jsonl: No such file"),
        (["--format=azure"], "line 1: must be TIMESTAMP,ContextTokens,GeneratedTokens"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, fault):
    assert main(["simulate", *CONVERSATION, *MACHINE, "--verbosity=-1", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("jaxserve simulate: ")
    assert fault in captured.err


@pytest.mark.parametrize("name", ["trace", "format", "model", "chip"])
def test_what_has_no_default_is_asked_for(capsys, name):
    arguments = [one for one in (*CONVERSATION, *MACHINE) if not one.startswith(f"--{name}=")]
    assert main(["simulate", *arguments]) == 2
    assert f"--{name} is needed" in capsys.readouterr().err


def test_a_config_json_that_is_none(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{")
    assert main(["simulate", *CONVERSATION, *MACHINE, f"--model={tmp_path}"]) == 2
    assert f"--model={tmp_path}: cannot read" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert main(["simulate", *CONVERSATION, *MACHINE, f"--model={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "model_type must be one of: llama, mistral, " in error
    assert "got 'gpt2'" in error


def test_help_names_every_arm(capsys):
    assert main(["simulate", "--help"]) == 0
    text = capsys.readouterr().out
    for word in ("--arrivals", "contiguous_pow2", "short_first", "--eviction", "block_hit_rate"):
        assert word in text


def test_nothing_of_it_imports_jax():
    code = (
        "import sys; from jaxserve.cli.main import main; "
        f"code = main({['simulate', *CONVERSATION, *MACHINE, '--max_requests=2']!r}); "
        "sys.exit(code or ' '.join(m for m in sys.modules if m.split('.')[0] in ('jax', 'flax')) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr.splitlines()[1:]) == (0, [])
