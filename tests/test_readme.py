"""Every command and every Python block of the README runs, with the tiny model in place of the real one,
and so do those of docs/sampling.md and the jaxserve commands of docs/kernels.md; those of
docs/performance.md are understood.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxserve.cli.main import main
from tests.llms import TINY
from tests.server.processes import ServerProcess, curl_parts

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
KERNELS = (ROOT / "docs" / "kernels.md").read_text()
SAMPLING = (ROOT / "docs" / "sampling.md").read_text()
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()
SCRIPTS = {"scripts/quickstart", "scripts/test"}  # run by .ci/run
FAST = [
    "--max_model_len=128",
    "--max_num_batched_tokens=16",
    "--max_num_seqs=2",
    "--kv_cache_gib=0.01",
    "--token_buckets=4,16",
    "--row_buckets=2",
]


def blocks(language: str, text: str = README) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def commands(text: str = README) -> list[str]:
    return [line for block in blocks("", text) for line in block.splitlines()]


def test_scripts_of_the_readme_are_what_ci_runs(repository):
    ci = (repository / ".ci" / "run").read_text()
    named = SCRIPTS & set(commands())
    assert named == SCRIPTS
    assert all(script in ci for script in named)


SERVE, BENCH, CURL = ".venv/bin/jaxserve serve ", ".venv/bin/jaxserve bench serve ", "curl "
SERVER = (SERVE, BENCH, CURL)  # run together, below
COMMANDS = [
    c
    for text in (README, KERNELS, SAMPLING)
    for c in commands(text)
    if c not in SCRIPTS and not c.startswith(SERVER)
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Of a user: the second command finds the programs of the first in the cache there."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, repository, tmp_path, home):
    program, *arguments = shlex.split(command)
    assert program == ".venv/bin/jaxserve"
    arguments = [
        a.replace("smollm2-135m-instruct", str(TINY))
        .replace("=checkpoints/tiny_llama", f"={TINY}")
        .replace("scripts/", f"{repository}/scripts/")
        for a in arguments
    ]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hi", "max_tokens": 3}\n')
    workload = '{"id": "a", "prompt_token_ids": [1, 2, 3], "max_tokens": 4, "ignore_eos": true}\n'
    (tmp_path / "workload.jsonl").write_text(workload)
    arguments = [re.sub(r"--workload=.*", "--workload=workload.jsonl", a) for a in arguments]
    if "--attention_interpret" in arguments:  # interpreters take long to compile
        arguments += ["--token_buckets=8", "--row_buckets=2"]
    split = 2 if arguments[0] == "bench" else 1
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve", *arguments[:split], *FAST, *arguments[split:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(repository), "HOME": str(home), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    written = tmp_path / "answers.jsonl"
    assert (written.read_text() if written.exists() else done.stdout).strip()


@pytest.mark.timeout(400)
def test_the_server_its_curl_and_its_bench(home, capsys):
    (serve,), (bench,), (curl,) = ([c for c in commands() if c.startswith(s)] for s in SERVER)
    arguments = shlex.split(serve.replace("smollm2-135m-instruct", str(TINY)))[2:]
    arguments.remove("--port=8000")
    command = [sys.executable, "-m", "jaxserve", "serve", *FAST, "--port=0", *arguments]
    path, headers, body = curl_parts(curl)
    with ServerProcess(command, {"HOME": str(home)}) as server:
        with server.wait_ready().http() as http:
            reply = http.post(path, headers=headers, content=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"]
        assert main([*shlex.split(bench)[1:], f"--base_url={server.url}"]) == 0
        assert json.loads(capsys.readouterr().out)["completed"] == 20
        assert server.stop() == 0


def test_commands_that_measure_are_understood_and_name_what_is_there(repository, capsys):
    for command in commands(PERFORMANCE):
        program, *arguments = shlex.split(command)
        if program == "scripts/bench_peers":
            continue
        assert program == ".venv/bin/jaxserve"
        assert main([*arguments, "--help"]) == 0, capsys.readouterr().err
        for path in re.findall(r"--workload=(\S+)", command):
            assert (repository / path).is_file()


@pytest.mark.parametrize("text", [README, SAMPLING], ids=["README", "sampling"])
def test_python_blocks(text, repository, monkeypatch, capsys):
    """One after the other in one namespace, as in a notebook."""
    monkeypatch.chdir(repository)
    small = "max_num_batched_tokens=8, max_num_seqs=2, max_model_len=256, num_pages=40, "
    small += "token_buckets=(8,), row_buckets=(2,)"
    names: dict[str, object] = {}
    for block in blocks("python", text):
        code = re.sub(r'"(checkpoints/)?smollm2-135m-instruct"', f'"{TINY}"', block)
        code = re.sub(r'(LLM|AsyncEngine)\("(.*?)"\)', rf'\1("\2", {small})', code)
        code = code.replace('{"max_num_seqs": 8}', f"dict({small})")
        code = code.replace("[504, 3575, 282]", "[5, 6, 7]")
        exec(compile(code, "README.md", "exec"), names)
        assert capsys.readouterr().out.strip()


def test_the_python_block_of_the_kernels(capsys):
    (block,) = blocks("python", KERNELS)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(block, "kernels.md", "exec"), {})
    assert capsys.readouterr().out == "(4, 8, 64) (1, 2, 2, 16, 64)\n"


def test_every_public_name_is_there():
    import jaxserve

    for name in jaxserve.__all__:
        assert getattr(jaxserve, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = jaxserve.Nothing
