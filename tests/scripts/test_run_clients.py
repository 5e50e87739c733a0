"""scripts/run_clients: what is installed when, how a server starts and ends, what is cut out of OpenAI's
description. The clients themselves run in CI (`scripts/run_clients --clients=quick`).
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.clients import installs, server_process
from scripts.clients.checks import equal, require, run_checks
from scripts.clients.installs import CLIENTS, Client
from scripts.clients.server_process import ServerError, ServerProcess

DESCRIPTION = Path(installs.__file__).parent / "data" / "openai_api.json"

FAKE_SERVER = """
import signal, sys, time
print("noise", file=sys.stderr, flush=True)
what = sys.argv[1]
if what == "broken":
    sys.exit("no such model")
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if what == "good":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("jaxserve: ready on http://127.0.0.1:1234", file=sys.stderr, flush=True)
time.sleep(60)
"""


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Starts a process that says what a server says."""
    monkeypatch.setattr(server_process, "CACHE", tmp_path)
    monkeypatch.setattr(server_process, "STOP_S", 2.0)
    popen = subprocess.Popen

    def fake(command, **options):
        assert command[1:3] == ["-m", "jaxserve.server"]
        assert "--port=0" in command
        return popen([sys.executable, "-c", FAKE_SERVER, command[-1]], **options)

    monkeypatch.setattr(subprocess, "Popen", fake)
    return lambda what: ServerProcess(Path("models/tiny"), [what])


def test_a_server_is_there_while_it_is_needed(start):
    with start("good") as process:
        assert process.server.base_url == "http://127.0.0.1:1234/v1"
        assert process.server.model == "tiny"
        process.check_alive()
    with pytest.raises(ServerError, match=r"the server ended \(0\): noise"):
        process.check_alive()


def test_a_server_that_does_not_start_says_why(start):
    with pytest.raises(ServerError, match=r"did not start: noise \| no such model"):
        start("broken")


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("stubborn", "did not end 2 s after SIGTERM"),
        ("rude", f"ended with -{signal.SIGTERM.value}"),
    ],
)
def test_a_server_that_ends_badly_is_told_of(start, what, match):
    with pytest.raises(ServerError, match=match), start(what):
        pass


def test_a_client_is_installed_once_for_each_version(monkeypatch, tmp_path):
    done: list[str] = []

    def install(folder: Path, requirement: str) -> None:
        folder.mkdir(exist_ok=True)
        done.append(requirement)

    monkeypatch.setattr(installs, "CACHE", tmp_path)
    monkeypatch.setattr(installs, "_install_python", install)
    monkeypatch.setattr(installs, "_install_node", install)
    for requirement in ("a==1", "a==1", "a==2"):
        Client(name="a", requirement=requirement, checks="a").ensure_installed()
    Client(name="b", requirement="b@1", checks="b.mjs", is_node=True).ensure_installed()
    assert done == ["a==1", "a==2", "b@1"]


def test_every_client_is_pinned_and_has_its_checks(repository):
    text = (repository / "docs" / "clients.md").read_text("utf-8")
    for name, client in CLIENTS.items():
        package, at, version = client.requirement.rpartition("@" if client.is_node else "==")
        assert package
        assert at
        file = client.checks if client.checks.endswith(".mjs") else f"{client.checks}.py"
        assert (repository / "scripts" / "clients" / file).is_file()
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}`")]
        assert version in row
        assert row.endswith("| yes |") == client.is_quick


def test_a_failed_check_is_told_and_the_others_run(capsys):
    ran = []
    checks = {
        "one": lambda: equal(1, 2, "number"),
        "two": lambda: ran.append(2),
        "three": lambda: require(None, "nothing there"),
    }
    with pytest.raises(SystemExit) as ended:
        run_checks(checks)
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert ran == [2]
    assert "failed  one: AssertionError: number: 1 is not 2" in said
    assert "ok      two" in said
    assert "failed  three: AssertionError: nothing there" in said
    with pytest.raises(SystemExit) as ended:
        run_checks({"two": lambda: None})
    assert ended.value.code == 0


def test_the_cut_holds_everything_that_it_points_at():
    document = json.loads(DESCRIPTION.read_text("utf-8"))
    assert document["info"]["license"]["identifier"] == "MIT"
    assert set(document["paths"]) == {
        "/chat/completions",
        "/completions",
        "/models",
        "/models/{model}",
    }

    def refs(value: object) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(refs, value)) if value else set()
        if not isinstance(value, dict):
            return set()
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(refs, value.values()))

    found = refs(document)
    assert len(found) > 50
    for ref in found:
        _, _, kind, name = ref.split("/")
        assert name in document["components"][kind]
