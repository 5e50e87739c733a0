"""`jaxserve serve`: flags to settings, and what is refused before anything is started."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

from jaxserve.cli.main import main
from jaxserve.cli.serve import read_api_keys
from jaxserve.server import serve
from jaxserve.server.config import ServerConfig, key_digest
from jaxserve.weights import loader

RESOLVE = loader.resolve_model


@pytest.fixture
def started(monkeypatch):
    """What would have been served, whatever the model: the settings, and the arguments of the engine."""
    monkeypatch.setattr(loader, "resolve_model", lambda model: Path(model))
    calls = []
    engine = types.ModuleType("jaxserve.async_engine.process")
    engine.ProcessEngine = lambda *given, **options: (given, options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxserve.async_engine.process", engine)
    monkeypatch.setattr(
        serve, "run_server", lambda config, make_client: calls.append((config, make_client())) or 0
    )
    return calls


def test_without_flags_the_settings_are_the_dataclasses_own(started):
    assert main(["serve", "--model=some/model"]) == 0
    ((config, (given, options)),) = started
    assert config == ServerConfig(model="some/model")
    assert given == ("some/model",)
    assert options["watchdog_timeout_s"] == config.watchdog_timeout_s
    assert options["max_num_seqs"] == 32
    assert options["generation_config"] == "auto"


def test_every_flag_reaches_its_field(started, tmp_path):
    keys, template = tmp_path / "keys", tmp_path / "template.jinja"
    keys.write_text("# ours\nsk-first-key\n\n  sk-second-key  \nsk-first-key\n")
    template.write_text("{{ messages }}")
    flags = tmp_path / "flags"
    flags.write_text("# a file of flags\n--port=0\n--max-queue-tokens=9\n")
    arguments = (
        f"--flagfile={flags} --host=0.0.0.0 --served_model_name=a --served_model_name=b "
        f"--api_key_file={keys} --max_queue_requests=7 --request_timeout_s=8 --queue_timeout_s=6 "
        "--shutdown_timeout=5 --watchdog_timeout_s=4 --send_timeout_s=3 --body_timeout_s=2 "
        "--max_body_bytes=1000 --max_bodies_bytes=5000 --max_connections=70 "
        f"--allowed_hosts=a.example,b.example --tool_call_parser=hermes --chat_template={template} "
        "--cors_allow_origin=https://a.example --cors_allow_origin=https://b.example --nodashboard "
        "--metrics_compat=vllm --generation_config=none --enable_prompt_tokens_details "
        "--max_num_seqs=3 --page_size=8"
    ).split()
    assert main(["serve", "--model=m", *arguments]) == 0
    ((config, (_, options)),) = started
    assert config == ServerConfig(
        model="m",
        served_model_names=("a", "b"),
        host="0.0.0.0",
        port=0,
        api_key_digests=(key_digest("sk-first-key"), key_digest("sk-second-key")),
        max_queue_requests=7,
        max_queue_tokens=9,
        request_timeout_s=8.0,
        queue_timeout_s=6.0,
        shutdown_timeout_s=5.0,
        watchdog_timeout_s=4.0,
        send_timeout_s=3.0,
        body_timeout_s=2.0,
        max_body_bytes=1000,
        max_bodies_bytes=5000,
        max_connections=70,
        allowed_hosts=("a.example", "b.example"),
        tool_call_parser="hermes",
        chat_template="{{ messages }}",
        cors_allow_origins=("https://a.example", "https://b.example"),
        dashboard=False,
        metrics_compat="vllm",
        enable_prompt_tokens_details=True,
    )
    assert options["max_num_seqs"] == 3
    assert options["page_size"] == 8
    assert options["generation_config"] == "none"
    assert options["watchdog_timeout_s"] == 4.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--model is needed"]),
        (["--model=m", "prompt"], ["unexpected argument 'prompt'"]),
        (["--model=m", "--prot=1"], ["prot", "port"]),
        (["--model=m", "--port=70000"], ["port must be", "70000"]),
        (["--model=m", "--port=http"], ["--port=http", "integer"]),
        (["--model=m", "--shutdown_timeout=-1"], ["shutdown_timeout", "-1"]),
        (["--model=m", "--request_timeout_s=nan"], ["request_timeout_s", "nan"]),
        (["--model=m", "--tool_call_parser=x"], ["tool_call_parser", "hermes"]),
        (["--model=m", "--max_num_seqs=0"], ["max_num_seqs", "0"]),
        (["--model=m", "--api_key_file=/nowhere/keys"], ["--api_key_file", "No such file"]),
        (["--model=m", "--chat_template=/nowhere/t"], ["--chat_template", "No such file"]),
        (["--model=m", "--api_key_file="], ["--api_key_file=: must name a file"]),
        (["--model=m", "--chat_template="], ["--chat_template=: must name a file"]),
        (["--model=m", "--host="], ["host must be", "''"]),
        (["--model=m", "--num_decode_steps=x"], ["--num_decode_steps=x: must be an integer"]),
        (["--model=m", "--allowed_hosts=a.org,http://b.org"], ["allowed_hosts", "'http://b.org'"]),
        (["--model=m", "--max_bodies_bytes=5"], ["max_bodies_bytes must be", "(16777216), got 5"]),
        (["--model=m", "--cors_allow_origin=x.org"], ["cors_allow_origin", "x.org"]),
        (["--model=m", "--scheduling=fast"], ["scheduling", "continuous"]),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(started, arguments, words, capsys):
    assert main(["serve", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxserve serve: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert not started


def test_a_model_that_is_not_there_is_known_before_anything_starts(started, monkeypatch, capsys):
    monkeypatch.setattr(loader, "resolve_model", RESOLVE)
    assert main(["serve", "--model=smollm2-135m-instrukt"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxserve serve: model 'smollm2-135m-instrukt' not found")
    assert "'smollm2-135m-instruct'" in err
    assert not started


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("# sk-commented-out\n", "holds no key"),
        ("sk-good-key\nshort\n", "line 2"),
        ("two words here\n", "line 1"),
        ("sk-schlüssel\n", "line 1"),
    ],
)
def test_a_file_without_good_keys_is_refused_and_not_repeated(text, words, tmp_path, capsys):
    path = tmp_path / "keys"
    path.write_text(text)
    assert main(["serve", "--model=m", f"--api_key_file={path}"]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert not any(line and line in err for line in text.split("\n"))


def test_a_home_folder_may_be_named_by_its_sign(monkeypatch, tmp_path, started):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "keys").write_text("sk-a-key-of-mine\n")
    (tmp_path / "template").write_text("{{ messages }}")
    files = ["--api_key_file=~/keys", "--chat_template=~/template"]
    assert main(["serve", "--model=m", *files]) == 0
    ((config, _),) = started
    assert config.api_key_digests == (key_digest("sk-a-key-of-mine"),)
    assert config.chat_template == "{{ messages }}"


def test_keys_are_kept_as_digests(tmp_path):
    path = tmp_path / "keys"
    path.write_text("sk-a-key-of-some-length\r\n")
    (digest,) = read_api_keys(str(path))
    assert digest == key_digest("sk-a-key-of-some-length")
    assert b"sk-" not in digest


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "jaxserve.server", "--helpfull"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: jaxserve serve --model=")
    assert "--shutdown_timeout" in done.stdout
    assert "--num_pages" in done.stdout


def test_the_server_process_imports_no_jax():
    code = "import sys, jaxserve.cli.serve, jaxserve.server.serve; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
