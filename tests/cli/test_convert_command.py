"""`jaxserve convert` as typed: exit codes, one line on stderr, the commands of docs/checkpoints.md, and the
models that they make, served.
"""

import json
import re
import shlex
from pathlib import Path

import pytest

from jaxserve.cli.main import main
from jaxserve.weights.loader import open_checkpoint
from tests.llms import FEW_BUCKETS, TINY, greedy, shared_llm

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def made(tmp_path_factory, repository) -> Path:
    """Runs the commands of the documentation, and gives the folder that they write to."""
    folder = tmp_path_factory.mktemp("documented")
    text = (repository / "docs" / "checkpoints.md").read_text()
    commands = re.findall(r"^\.venv/bin/jaxserve (convert .*)$", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command.replace("build/", f"{folder}/"))
        words = [str(TINY) if word == "checkpoints/tiny_llama" else word for word in words]
        assert main(words) == 0
    return folder


def test_the_documented_commands_write_what_they_say(made):
    names = [path.name for path in (made / "tiny_orbax").iterdir()]
    assert {"params", "config.json", "tokenizer.json", "chat_template.jinja"} <= set(names)
    infos = open_checkpoint(made / "tiny_bf16").source.infos.values()
    assert {info.dtype for info in infos} == {"BF16"}


def test_llm_and_run_take_an_orbax_checkpoint(made, tmp_path, capsys):
    params = greedy(12)
    expected = shared_llm(TINY, **FEW_BUCKETS).generate([PROMPT, "the cat"], params)
    model = made / "tiny_orbax"
    found = shared_llm(model, **FEW_BUCKETS).generate([PROMPT, "the cat"], params)
    assert [one.outputs[0].token_ids for one in found] == [
        one.outputs[0].token_ids for one in expected
    ]
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "the cat", "max_tokens": 12, "ignore_eos": true}\n'
    )
    output = tmp_path / "out.jsonl"
    flags = ["--max_model_len=128", "--max_num_seqs=4", "--kv_cache_gib=0.01", "--temperature=0"]
    flags += ["--max_num_batched_tokens=32", "--token_buckets=4,32", "--row_buckets=4"]
    flags += [f"--input={tmp_path / 'in.jsonl'}", f"--output={output}", "--compilation_cache_dir="]
    assert main(["run", f"--model={model}", *flags]) == 0, capsys.readouterr().err
    assert json.loads(output.read_text())["text"] == expected[1].outputs[0].text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give SRC and DST, two arguments; got 0"),
        (["a", "b", "c", "--format=orbax"], "give SRC and DST, two arguments; got 3"),
        (["a", "b"], "give --format=safetensors or --format=orbax"),
        (["a", "b", "--format=gguf"], "--format=gguf: value should be one of <safetensors|orbax>"),
        (["a", "b", "--format=orbax", "--dtype=int8"], "--dtype=int8: value should be one of"),
        (
            ["a", "b", "--format=safetensors", "--max_shard_gib=0"],
            "--max_shard_gib must be above 0",
        ),
        (["a", "b", "--format=safetensors", "--max_shard_gib=x"], "must be a number"),
        (["a", "b", "--format=orbax", "--max_shard_gib=1"], "has no shards of that kind"),
        (["nothing", "b", "--format=orbax"], "model 'nothing' not found"),
        ([str(TINY), str(TINY), "--format=orbax"], "is there already and is not empty"),
        ([str(TINY), "", "--format=orbax"], "DST must be a folder, got ''"),
        ([str(TINY), "/proc/x/y", "--format=safetensors"], "cannot write /proc/x/y"),
    ],
)
def test_failures_are_exit_2_and_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_help(capsys):
    assert main(["convert", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: jaxserve convert SRC DST")
    for flag in ("--format", "--dtype", "--max_shard_gib"):
        assert flag in out
    assert "--max_num_seqs" not in out
