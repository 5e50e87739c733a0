"""Commands, exit codes, and what never costs an import of jax."""

import subprocess
import sys

import pytest

from jaxserve import __version__
from jaxserve.cli.bench import KINDS
from jaxserve.cli.main import COMMANDS, main
from tests.cli.conftest import ROOT


@pytest.mark.parametrize("argument", ["--help", "-h", "help", "--helpfull"])
def test_help(argument, capsys):
    assert main([argument]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in COMMANDS)
    assert "  bench KIND " in out
    assert "exit code: 0 " in out


@pytest.mark.parametrize(
    "command",
    [*(name for name in COMMANDS if name != "bench"), *(f"bench {kind}" for kind in KINDS)],
)
def test_every_commands_help_begins_with_its_usage_and_tells_the_exit_codes(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: jaxserve {command} ")
    assert "exit code: 0 " in out
    assert out.count("--flagfile:") == 1


def test_help_of_bench_names_its_kinds(capsys):
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: jaxserve bench KIND")
    assert all(f"\n  {kind} " in out for kind in KINDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxserve {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], ["unknown command 'rnu'", "did you mean 'run'"]),
        (["--model=x", "run"], ["unknown flag '--model=x'", "commands: run"]),
        ([], ["usage: jaxserve COMMAND"]),
        (["run", "--modle=x"], ["jaxserve run: unknown flag '--modle'", "--model"]),
        (["run", "hello"], ["jaxserve run: --model is needed"]),
        (["run", "--model=x"], ["give a prompt, or --input=FILE"]),
        (["run", "--model=x", "--input=y", "hello"], ["not both"]),
        (["run", "--model=x", "--input=/no/such"], ["cannot read --input=/no/such: No such file"]),
        (["run", "--model=x", "--input=/"], ["cannot read --input=/: Is a directory"]),
        (["run", "--model=x", "--max-num-seqs=0", "a"], ["max_num_seqs", "[1, 4096]", "0"]),
        (["run", "--model=x", "--page-size=3", "a"], ["page_size", "3"]),
        (["run", "--model=x", "--target-itl-s=0", "a"], ["target_itl_s", "(0, inf)"]),
        (["run", "--model=x", "--max-num-partial-prefills=0", "a"], ["max_num_partial_prefills"]),
        (["run", "--model=x", "--long-prefill-token-threshold=0", "a"], ["long_prefill_token"]),
        (["run", "--model=x", "--host-kv-gib=-1", "a"], ["host_kv_gib", "[0, 1048576]", "-1"]),
        (["run", "--model=x", "--host-kv-gib=nan", "a"], ["host_kv_gib", "nan"]),
        (["run", "--model=x", "--preemption-mode=swap", "a"], ["'swap' needs room", "host_kv_gib"]),
        (["run", "--model=x", "--temperature=nan", "a"], ["temperature", "nan"]),
        (["run", "--model=x", "--attention-backend=xl", "a"], ["attention_backend='xl'", "known"]),
        (["run", "--model=x", "--stop-token-ids=-3", "a"], ["stop_token_ids", "-3"]),
        (
            ["bench", "offline", "--model=x", "--workload=y", "--attention-backend=xl"],
            ["attention_backend='xl'"],
        ),
        (["run", "--model=x", "--max-tokens=-1", "a"], ["max_tokens", "-1"]),
        (["run", "--model=x", "--resume", "a"], ["--resume needs an --output"]),
        (["run", "--model=x", "--output=/no/such/o", "a"], ["cannot write --output=/no/such/o"]),
        (["run", "--model=x", "--chat", "--input=-"], ["--chat"]),
        (["bench", "ofline"], ["jaxserve bench: name what to measure", "did you mean 'offline'"]),
        (["bench", "offline", "--model=x"], ["--workload is needed: JSON lines, as"]),
        (["bench", "offline", "--model=x", "--workload=w2"], ["/w2.jsonl'?"]),
        (
            ["bench", "latency"],
            ["--model is needed: a checkpoint directory, a .gguf file, or a name"],
        ),
        (["bench", "latency", "--model=x", "a"], ["unexpected argument 'a'"]),
        (["bench", "latency", "--model=x", "--output_len=1"], ["output_len=1", "2"]),
        (
            ["bench", "latency", "--model=x", "--batch_size=9", "--max_num_seqs=8"],
            ["--batch_size=9: at most --max_num_seqs=8"],
        ),
        (["bench", "kernels", "--steps=nope"], ["--steps=nope: no 'nope'; known: ", "decode-b1"]),
        (["bench", "kernels", "--heads=nope"], ["--heads=nope: no 'nope'; known: smollm2-135m"]),
        (["bench", "kernels", "--layers=0"], ["--layers=0: must be at least 1"]),
        (["bench", "kernels", "--repetitions=0"], ["repetitions=0"]),
        (["bench", "kernels", "--backends=nope"], ["attention_backend='nope': no such backend"]),
        (["bench", "kernels", "--backends=gpu"], ["attention_backend='gpu' runs on gpu, and this"]),
        (["bench", "kernels", "--page_size=3"], ["page_size=3: attention backend"]),
        (
            ["bench", "kernels", "--output=nowhere/x"],
            ["--output=nowhere/x: No such file or directory"],
        ),
        (["bench", "offline", "extra", "--model=x"], ["unexpected argument 'extra'"]),
        (
            ["bench", "offline", "--model=x", "--workload=y", "--scheduling=fast"],
            ["scheduling", "fast"],
        ),
    ],
)
def test_what_cannot_start_exits_with_2_and_one_line(arguments, words, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(word in captured.err for word in words), captured.err
    assert arguments == [] or captured.err.count("\n") == 1


def test_a_model_that_is_none_exits_with_2(made, tmp_path, capsys):
    assert main(["run", f"--model={tmp_path}/none", "--max-tokens=3", "hello"]) == 2
    assert capsys.readouterr().err.endswith("none: no such checkpoint\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["run", "--help"], 0),
        (["run", "--helpfull", "x"], 0),
        (["bench", "--help"], 0),
        (["bench", "offline", "--help"], 0),
        (["run", "--nonsense"], 2),
        (["run", "--model=x", "--max_num_seqs=0", "prompt"], 2),
        (["run", "--model=x", "--attention_backend=y", "prompt"], 2),
        (["run", "--model=no-such-model", "prompt"], 2),
        (["run", "--model=no/such/model", "--output={tmp}/o", "prompt"], 2),
        (["run", "--model={tmp}", "prompt"], 2),
        (["run", "--model={tmp}/broken", "prompt"], 2),
        (["bench", "offline", "--model=no-such-model", "--workload={tmp}/w.jsonl"], 2),
        (["fetch", "no-such-model"], 2),
        (["replay", "--help"], 0),
        (["simulate", "--help"], 0),
        (["buckets", "--help"], 0),
        (["buckets", "--schedule_log={tmp}/w.jsonl"], 2),
        (["replay", "--model=no-such-model", "--schedule_log={tmp}/w.jsonl"], 2),
        (["run", "--model=x", "--stats_file=/no/such/file", "prompt"], 2),
    ],
)
def test_help_and_mistakes_do_not_import_jax(arguments, code, tmp_path):
    (tmp_path / "w.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    program = (
        "import sys; from jaxserve.cli.main import main; code = main(sys.argv[1:]); "
        "assert not {'jax', 'flax'} & set(sys.modules); sys.exit(code)"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == code, process.stderr
    assert "Traceback" not in process.stderr
    assert code == 0 or process.stderr.count("\n") == 1


def test_python_m_jaxserve():
    process = subprocess.run(
        [sys.executable, "-m", "jaxserve", "run", "--maxtokens=3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2
    assert "did you mean --max_tokens?" in process.stderr
