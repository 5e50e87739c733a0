"""scripts/bench_transformers in a folder of its own, with arms that only speak the protocol."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WORKLOAD = [
    {"id": name, "prompt_token_ids": [1] * size, "max_tokens": count} | {"ignore_eos": True}
    for name, size, count in (("a", 3, 2), ("b", 1, 4))
]
FIXED = {"temperature": 0}
TOKEN_IDS = [[5, 6], [7, 8, 9, 10]]

# Stands in for an interpreter, and so for the arm that it is told to run: notes what happens, replies.
FAKE_ARM = """#!{python}
import json, pathlib, sys
log = open({log!r}, "a")
def note(text):
    print({name!r}, text, file=log, flush=True)
note(" ".join([pathlib.Path(sys.argv[1]).name, *sys.argv[2:]]))
print(json.dumps({{"versions": {{"fake": {name!r}}}}}), flush=True)
for _, wall_s in zip(sys.stdin, {walls}):
    note("measured")
    reply = {{"wall_s": wall_s, "cpu_s": wall_s, "token_ids": {token_ids}, "notes": {{}}}}
    print(json.dumps(reply), flush=True)
note("done")
sys.exit({status})
"""


class Project:
    """A checkout with the script alone, and what was noted when it ran."""

    def __init__(self, root: Path, repository: Path):
        self.root, self.log = root, root / "log"
        self.peer, self.own = root / "peer" / "python", root / ".venv" / "bin" / "python"
        self.home = root / "home"
        for folder in ("scripts", "model", "bin", "home"):
            (root / folder).mkdir(parents=True)
        shutil.copy(repository / "scripts" / "bench_transformers", root / "scripts")
        (root / "model" / "config.json").write_text("{}")
        self.write_workload([one | FIXED for one in WORKLOAD])
        self.write_arm(self.own, "jaxserve", walls=[2.0, 1.0])
        self.write_arm(self.peer, "transformers", walls=[6.0, 8.0])

    def write_workload(self, lines: list[dict]) -> None:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (self.root / "workload.jsonl").write_text(text)

    def write_arm(self, path: Path, name: str, *, walls, token_ids=TOKEN_IDS, status=0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = FAKE_ARM.format(
            python=sys.executable,
            log=str(self.log),
            name=name,
            walls=walls,
            token_ids=token_ids,
            status=status,
        )
        path.write_text(text)
        path.chmod(0o755)

    def run(self, *flags: str) -> subprocess.CompletedProcess:
        self.log.write_text("")
        script = self.root / "scripts" / "bench_transformers"
        common = ["--model=model", "--workload=workload.jsonl", "--repetitions=2"]
        return subprocess.run(
            [sys.executable, script, *common, *flags],
            cwd=self.root,
            env={"PATH": f"{self.root / 'bin'}", "HOME": str(self.home)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def compare(self) -> subprocess.CompletedProcess:
        return self.run(f"--peer_python={self.peer}")

    def noted(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def project(tmp_path, repository) -> Project:
    return Project(tmp_path / "a check out", repository)


def test_arms_take_turns_and_are_started_once(project):
    done = project.compare()
    assert done.returncode == 0, done.stderr
    model, workload = project.root / "model", project.root / "workload.jsonl"
    flags = f"--model={model} --workload={workload}"
    noted = project.noted()
    assert noted[0] == f"jaxserve jaxserve_offline.py {flags} --dtype=float32"
    assert noted[1].startswith(f"transformers transformers_static.py {flags} --num_threads=")
    turn = ["jaxserve measured", "transformers measured"]
    assert noted[2:6] == turn * 2
    assert sorted(noted[6:]) == ["jaxserve done", "transformers done"]


def test_result_holds_medians_and_the_ratio_of_each_pair(project):
    result = json.loads(project.compare().stdout)
    ours, theirs = result["arms"]["jaxserve"], result["arms"]["transformers"]
    assert (ours["wall_s"], ours["wall_s_median"]) == ([2.0, 1.0], 1.5)
    assert (theirs["wall_s"], theirs["wall_s_median"]) == ([6.0, 8.0], 7.0)
    assert (ours["output_tokens_per_s"], theirs["output_tokens_per_s"]) == (6 / 1.5, 6 / 7.0)
    assert (ours["versions"], theirs["versions"]) == (
        {"fake": "jaxserve"},
        {"fake": "transformers"},
    )
    ratio = result["ratio"]
    assert ratio["each"] == [3.0, 8.0]
    assert (ratio["min"], ratio["median"], ratio["max"]) == (3.0, 5.5, 8.0)
    assert (result["num_requests"], result["num_output_tokens"]) == (2, 6)
    assert (result["num_equal_requests"], result["different_requests"]) == (2, [])


def test_different_ids_are_counted_and_located(project):
    other = [TOKEN_IDS[0], [7, 8, 0, 10]]
    project.write_arm(project.peer, "transformers", walls=[1.0, 1.0], token_ids=other)
    result = json.loads(project.compare().stdout)
    assert result["num_equal_requests"] == 1
    assert result["different_requests"] == [{"line": 2, "id": "b", "first_difference": 2}]


def test_too_few_tokens_are_no_result(project):
    short = [TOKEN_IDS[0], TOKEN_IDS[1][:3]]
    project.write_arm(project.peer, "transformers", walls=[1.0, 1.0], token_ids=short)
    done = project.compare()
    assert (done.returncode, done.stdout) == (1, "")
    assert "line 2 asks for 4 tokens, got [3, 4]" in done.stderr


def test_arm_that_ends_early_is_named_and_the_other_one_is_ended(project):
    project.write_arm(project.peer, "transformers", walls=[1.0], status=7)
    done = project.compare()
    assert (done.returncode, done.stdout) == (1, "")
    assert "the transformers arm ended with status 7" in done.stderr
    assert "jaxserve done" in project.noted()


@pytest.mark.parametrize(
    "fault",
    [{"ignore_eos": False}, {"temperature": 1}, {"prompt_token_ids": []}, {"max_tokens": 0}],
)
def test_workload_that_leaves_something_open_is_refused(project, fault):
    project.write_workload([WORKLOAD[0] | FIXED, WORKLOAD[1] | FIXED | fault])
    done = project.compare()
    assert (done.returncode, done.stdout, project.noted()) == (1, "", [])
    assert "workload.jsonl, line 2: prompt_token_ids, max_tokens" in done.stderr


@pytest.mark.parametrize("flag", ["--repetitions=0", "--workload=nothing.jsonl", "--model=bin"])
def test_bad_flags_are_refused(project, flag):
    done = project.run(f"--peer_python={project.peer}", flag)
    assert (done.returncode, project.noted()) == (2, [])
    assert flag.partition("=")[0] in done.stderr


def test_missing_environment_says_what_to_run(project):
    project.own.unlink()
    assert "scripts/setup first" in project.compare().stderr


def test_peer_environment_is_made_once_and_made_good_after_an_interruption(project):
    # Makes "a venv" whose Python "installs" and then is the arm; the first call's installation fails.
    venv = project.home / ".cache" / "jaxserve" / "peers" / "transformers"
    calls, arm = project.root / "calls", project.root / "arm"
    project.write_arm(arm, "transformers", walls=[1.0, 1.0])
    fake = project.root / "bin" / "python3"
    fake.write_text(f"""#!/bin/sh
echo "$*" >>"{calls}"
case "$2" in
  venv) /bin/mkdir -p "$4/bin"; /bin/cp "$0" "$4/bin/python" ;;
  pip) test -e "{project.root}/may install" ;;
  *) exec "{arm}" "$@" ;;
esac
""")
    fake.chmod(0o755)
    assert project.run().returncode != 0
    (project.root / "may install").touch()
    calls.write_text("")
    for _ in range(2):
        done = project.run()
        assert done.returncode == 0, done.stderr
    made = [line for line in calls.read_text().splitlines() if line.startswith("-m")]
    assert made[0] == f"-m venv --clear {venv}"
    assert made[1].startswith("-m pip install --quiet torch==2.13.0 ")
    assert len(made) == 2
