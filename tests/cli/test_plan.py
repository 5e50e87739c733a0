"""`jaxserve plan`: one JSON object or a table, exit code 1 where the model does not fit, and every mistake a
line and exit code 2.
"""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.cli import plan_aot
from jaxserve.cli.main import main
from jaxserve.cli.plan import plan_config, plan_flags
from jaxserve.cli.plan_sweep import POINT_FIELDS, curves
from jaxserve.plan.chips import CHIPS
from jaxserve.weights.loader import open_checkpoint
from tests.gguf_files import write_gguf

REPOSITORY = Path(__file__).parent.parent.parent
TRACE = REPOSITORY / "tests" / "plan" / "data" / "azure_code.csv"
LLAMA = ["--model=llama-3-8b", "--chip=h100"]
KEYS = {
    "kv_bytes_per_token",
    "weight_bytes",
    "num_pages",
    "max_concurrency",
    "decode_tokens_per_s",
    "prefill_tokens_per_s",
    "ridge_batch",
}


@pytest.fixture
def run_json(capsys):
    def run(*arguments: str, code: int = 0) -> dict:
        assert main(["plan", "--json", "--verbosity=-1", *arguments]) == code
        captured = capsys.readouterr()
        assert captured.err == ""
        return json.loads(captured.out)

    return run


def test_the_json_object(run_json):
    record = run_json("--model=llama-3-70b", "--chip=v5e", "--num_chips=16")
    assert record.keys() >= KEYS
    assert all(isinstance(record[name], int | float) for name in KEYS)
    assert record["kv_bytes_per_token"] == 327_680
    assert record["weight_bytes"] == 141_107_412_992
    assert record["weight_bytes_by_dtype"]["float32"] == 282_214_825_984
    assert record["ridge_batch"] == 241
    assert record["fits"] is True
    assert record["short_by_bytes"] == 0
    assert record["fewest_chips"] == record["num_chips"] == 16
    assert record["num_kv_tokens"] == (record["num_pages"] - 1) * record["page_size"]
    assert record["decode"][-1]["tokens_per_s"] == record["decode_tokens_per_s"]
    assert record["decode"][-1]["num_tokens"] == record["decode_batch"]
    assert record["prefill"][-1]["num_tokens"] == 2048
    assert record["token_buckets"][-1] == 2048
    assert record["row_buckets"] == [1, 2, 4, 8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_takes_a_small_model(run_json, chip):
    record = run_json("--model=smollm2-135m", f"--chip={chip}")
    assert record["fits"]
    assert record["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2


def test_flags_change_what_they_name(run_json):
    plain = run_json(*LLAMA)
    assert run_json(*LLAMA, "--kv_cache_dtype=int8")["kv_bytes_per_token"] == 65536
    full = run_json(*LLAMA, "--dtype=float32")
    assert full["weight_bytes"] == 2 * plain["weight_bytes"]
    assert full["attention_backend"] == "xla"  # the Hopper kernel serves bfloat16
    more = run_json(*LLAMA, "--memory_utilization=0.95")
    assert more["num_pages"] > plain["num_pages"]
    longer = run_json(*LLAMA, "--lengths=4096,1024")
    assert longer["pages_per_sequence"] == 80
    assert longer["max_concurrency"] < plain["max_concurrency"]
    few = run_json(*LLAMA, "--max_num_seqs=8", "--max_num_batched_tokens=512")
    assert (few["decode_batch"], few["token_buckets"][-1]) == (8, 512)


def test_the_table_is_made_of_the_same_numbers(capsys, run_json):
    record = run_json("--model=llama-3-70b", "--chip=h100", "--num_chips=8")
    assert main(["plan", "--model=llama-3-70b", "--chip=h100", "--num_chips=8"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "llama-3-70b on 8 x h100: weights bfloat16, pages bfloat16, attention gpu\n"
    )
    assert "327,680 B  2 x 80 layers x 8 kv heads x 128 head_dim x 2 B" in text
    assert "40,960 B  1 of the 8 kv heads, page layout head_major" in text
    assert f"{record['num_pages']:,}  of 64 tokens, 2,621,440 B each; one is the null page" in text
    assert f"{record['max_concurrency']:,}  of 1,024 + 256 tokens = 20 pages" in text
    assert f"{record['decode_tokens_per_s']:,.0f}" in text
    assert f"{record['prefill_tokens_per_s']:,.0f}" in text
    assert "bound by" in text
    assert "\n  tokens  1 2 4 " in text


def test_heads_that_are_held_twice_are_told(capsys):
    assert main(["plan", "--model=llama-3-70b", "--chip=v5e", "--num_chips=16"]) == 0
    assert "1 of the 8 kv heads, each head by 2 chips, page layout tpu" in capsys.readouterr().out


def test_what_does_not_fit_ends_with_1_and_says_by_how_much(capsys, run_json):
    arguments = ["--model=llama-3-70b", "--chip=v5e", "--num_chips=8"]
    record = run_json(*arguments, code=1)
    assert (record["fits"], record["num_pages"], record["max_concurrency"]) == (False, 0, 0)
    assert (record["decode_tokens_per_s"], record["decode"]) == (0.0, [])
    assert record["fewest_chips"] == 16
    assert main(["plan", *arguments]) == 1
    text = capsys.readouterr().out
    lacking = f"{record['short_by_bytes'] / 1e9:,.3f} GB"
    assert (
        f"does not fit: each chip lacks {lacking} for one such sequence; 16 chips hold it" in text
    )


def test_a_config_json_alone_is_enough(run_json, tmp_path):
    values = json.loads((REPOSITORY / "checkpoints" / "tiny_llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values))
    by_folder = run_json(f"--model={tmp_path}", "--chip=cpu", "--lengths=8,8")
    by_file = run_json(f"--model={tmp_path / 'config.json'}", "--chip=cpu", "--lengths=8,8")
    fetched = run_json("--model=tiny_llama", "--chip=cpu", "--lengths=8,8")
    wanted = (
        2 * values["num_hidden_layers"] * values["num_key_value_heads"] * values["head_dim"] * 2
    )
    for record in (by_folder, by_file, fetched):
        assert record["kv_bytes_per_token"] == wanted
        assert record["num_params"] == by_folder["num_params"]


def test_the_head_of_a_gguf_file_is_enough(run_json, tmp_path):
    folder = REPOSITORY / "checkpoints" / "tiny_llama"
    path = write_gguf(tmp_path / "tiny.gguf", open_checkpoint(folder))
    by_file = run_json(f"--model={path}", "--chip=v5e", "--lengths=8,8")
    by_folder = run_json(f"--model={folder}", "--chip=v5e", "--lengths=8,8")
    assert by_file | {"model": ""} == by_folder | {"model": ""}


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--model=llama-3-9b"], "did you mean llama-3-8b?"),
        (["--chip=b200"], "value should be one of <v5e|v5p|v6e|a100|h100|h200|cpu>"),
        (["--num_chips=3"], "num_chips must divide the model's 32 query heads, got 3"),
        (["--lengths=5"], "--lengths=5: must be two numbers from 1 up"),
        (["--lengths=0,5"], "--lengths=0,5: must be two numbers from 1 up"),
        (["--lengths=a,5"], "must be integers with commas between them"),
        (["--lengths=131000,1000"], "pass max_model_len, 131072"),
        (["--page_size=16"], "page_size=16: attention backend 'gpu' serves 64 only"),
        (["--memory_utilization=2"], "memory_utilization must be a number in (0, 1.0], got 2.0"),
        (["--aot"], "--aot compiles for v5e, v6e, v5p, got --chip=h100"),
        (["--aot", "--chip=v5e", "--num_chips=512"], "num_chips must divide"),
        (["--sweep=x"], "--sweep needs --format"),
        (["--format=azure"], "--format belongs to --sweep"),
        (["--sweep=none.csv", "--format=azure"], "cannot read none.csv"),
        ([f"--sweep={TRACE}", "--format=azure", "--rate_scales=0"], "must be numbers above 0"),
        (["more"], "unexpected argument 'more'"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, fault):
    assert main(["plan", *LLAMA, "--verbosity=-1", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("jaxserve plan: ")
    assert fault in captured.err


def test_more_chips_than_a_topology_has(capsys, tmp_path):
    wide = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "num_attention_heads": 512,
        "head_dim": 128,
        "vocab_size": 51200,
    }
    (tmp_path / "config.json").write_text(json.dumps(wide))
    arguments = [f"--model={tmp_path}", "--chip=v5e", "--num_chips=512", "--aot"]
    assert main(["plan", *arguments, "--verbosity=-1"]) == 2
    assert "--num_chips=512: --aot compiles for at most 256 v5e" in capsys.readouterr().err


def test_without_libtpu_it_says_how_to_get_the_one_of_this_jax(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(plan_aot.importlib.util, "find_spec", lambda name: None)
    assert main(["plan", *LLAMA, "--chip=v6e", "--num_chips=2", "--aot", "--verbosity=-1"]) == 2
    error = capsys.readouterr().err
    assert "pip install --target=FOLDER 'libtpu==" in error
    missing = [f"--libtpu={tmp_path / 'none.so'}", "--aot", "--chip=v6e", "--num_chips=2"]
    assert main(["plan", *LLAMA, *missing]) == 2
    assert "none.so: no such file" in capsys.readouterr().err


def test_a_compiler_that_dies_is_one_line(capsys, tmp_path):
    library = tmp_path / "libtpu.so"
    library.write_bytes(b"no library")
    arguments = [f"--libtpu={library}", "--aot", "--chip=v6e", "--aot_layers=1"]
    assert main(["plan", "--model=smollm2-135m", *arguments, "--verbosity=-1"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "--aot: the compiler's process ended with 1: " in captured.err


def test_a_sweep_draws_latency_over_throughput(capsys, run_json, tmp_path):
    points_file = tmp_path / "points.csv"
    arguments = [
        *LLAMA,
        f"--sweep={TRACE}",
        "--format=azure",
        "--max_requests=60",
        "--rate_scales=8,1,64",
        f"--sweep_csv={points_file}",
    ]
    swept = run_json(*arguments)["sweep"]
    points = swept["points"]
    assert (swept["trace"], swept["num_requests"]) == ("azure_code.csv", 60)
    assert [one["rate_scale"] for one in points] == [1, 8, 64]
    assert all(tuple(one) == POINT_FIELDS for one in points)
    rates = [one["output_tokens_per_s"] for one in points]
    assert rates == sorted(rates)
    assert points[-1]["ttft_p99_s"] > points[0]["ttft_p99_s"]  # it waits in the queue
    with points_file.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["output_tokens_per_s"]) for row in rows] == rates
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert "time to the first token, s (o p50, + p99), over output tokens/s" in text
    assert swept["chart"] == curves(points)
    assert swept["chart"] in text


def test_a_point_of_a_chart_stands_where_its_numbers_say():
    points = [
        dict.fromkeys(POINT_FIELDS, 1.0)
        | {"output_tokens_per_s": 100.0 * i, "ttft_p50_s": 0.1 * i, "ttft_p99_s": 10.0}
        for i in (1, 10)
    ]
    chart = curves(points).split("time to the first token")[1].split("gap between")[0].splitlines()
    rows = [line.partition("|")[2] for line in chart if "|" in line]
    assert rows[0].index("+") == round(0.1 * 55)  # the longest at the top, throughput to the right
    assert rows[0].rindex("+") == 55
    assert rows[-1].index("o") == round(0.1 * 55)
    assert sum(row.count("o") for row in rows) == 2
    assert (
        curves([points[0] | {"ttft_p50_s": None, "ttft_p99_s": None}]).count("nothing to draw") == 1
    )


def test_every_flag_reaches_the_plan():
    values = plan_flags()
    values(
        [
            "plan",
            "--model=qwen3-8b",
            "--chip=v5p",
            "--num_chips=2",
            "--max_model_len=4096",
            "--page_size=32",
            "--lengths=10,20",
        ]
    )
    config = plan_config(values.flag_values_dict())
    assert (config.num_chips, config.longest, config.cache.page_size) == (2, 4096, 32)
    assert (config.num_prompt_tokens, config.num_output_tokens) == (10, 20)
    assert config.chip is CHIPS["v5p"]


def test_nothing_of_it_imports_jax():
    code = (
        "import sys; from jaxserve.cli.main import main; "
        f"code = main({['plan', *LLAMA, '--json']!r}); "
        "sys.exit(code or ' '.join(m for m in sys.modules if m.split('.')[0] in ('jax', 'flax')) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
