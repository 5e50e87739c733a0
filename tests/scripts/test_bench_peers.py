"""scripts/bench_peers: with peers that only speak the protocol, and what is made of their replies."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.outside import STAMP, PeerError
from scripts.peers import installs, table
from scripts.peers.arm import Arm, time_start
from scripts.peers.comparison import (
    ComparisonError,
    compare,
    decode_roofline,
    modes,
    read_requests,
    spread,
)
from scripts.peers.installs import Peer
from scripts.peers.protocol import read_prompts

WORKLOAD = [
    {"id": name, "prompt_token_ids": [1] * size, "max_tokens": count, "ignore_eos": True}
    | {"temperature": 0}
    for name, size, count in (("a", 3, 2), ("b", 1, 4))
]
IDS = [[5, 6], [7, 8, 9, 10]]

# A worker: notes what it is asked, and replies with the wall times it was given.
FAKE_WORKER = """
import pathlib, sys
from scripts.peers.protocol import Outcome, claim_stdout, serve
replies = claim_stdout()
name, log, walls, status = sys.argv[1], sys.argv[2], eval_list(sys.argv[3]), int(sys.argv[4])
def note(text):
    with open(log, "a") as file:
        print(name, text, file=file)
def run(prompts, prefix_caching):
    count = sum(one.max_tokens for one in prompts)
    note(f"{count} tokens, cache {prefix_caching}")
    if not walls:
        sys.exit(status)
    print("noise that is no reply")
    ids = [list(range(5, 5 + one.max_tokens)) for one in prompts]
    return Outcome(walls.pop(0), ids, [0.5] * len(prompts))
machine = {"stream_bytes_per_s": 8.0, "gemm_flops_per_s": 9.0, "weight_bytes": 2, "kv_bytes_per_token": 0}
serve(replies, {"fake": name}, run, {"roofline": lambda: machine})
note("done")
""".replace("eval_list(sys.argv[3])", "[float(x) for x in sys.argv[3].split(',') if x]")


def replies(*walls: float, ids=IDS, firsts=(0.1, 0.3)) -> list[dict]:
    return [
        {"wall_s": wall, "token_ids": ids, "first_token_s": list(firsts), "notes": {}}
        for wall in walls
    ]


# The figures.


def test_ratios_are_of_runs_that_followed_each_other():
    runs = {
        "jaxserve": {"on": replies(2.0, 1.0, 4.0)},
        "vllm": {"on": replies(6.0, 8.0, 4.0)},
        "transformers": {"off": replies(4.0, 4.0, 4.0, firsts=())},
    }
    result = compare(WORKLOAD, runs)
    speed = result["against"]["vllm"]["on"]["speed"]
    assert speed == {"median": 3, "min": 1, "max": 8, "each": [3, 8, 1]}
    assert result["against"]["transformers"]["off"]["speed"]["each"] == [2, 4, 1]
    ours = result["engines"]["jaxserve"]["on"]
    assert ours["wall_s"] == {"median": 2, "min": 1, "max": 4, "each": [2, 1, 4]}
    assert ours["output_tokens_per_s"]["each"] == [3, 6, 1.5]
    assert ours["ttft_s"]["median"] == pytest.approx(0.2)
    assert "ttft_s" not in result["engines"]["transformers"]["off"]
    assert (result["num_requests"], result["num_output_tokens"], result["cache"]) == (2, 6, {})


def test_each_mode_is_compared_with_the_same_mode_and_the_cache_with_its_absence():
    runs = {
        "jaxserve": {"on": replies(1.0, 1.0), "off": replies(3.0, 5.0)},
        "vllm": {"on": replies(2.0, 2.0), "off": replies(30.0, 50.0)},
        "llama_cpp": {"off": replies(9.0, 10.0)},
    }
    result = compare(WORKLOAD, runs)
    assert {
        (name, mode): one["speed"]["each"]
        for name, by_mode in result["against"].items()
        for mode, one in by_mode.items()
    } == {("vllm", "on"): [2, 2], ("vllm", "off"): [10, 10], ("llama_cpp", "off"): [3, 2]}
    assert {name: one["each"] for name, one in result["cache"].items()} == {
        "jaxserve": [3, 5],
        "vllm": [15, 25],
    }


def test_different_ids_are_counted_and_located():
    other = [IDS[0], [7, 8, 0, 10]]
    theirs = [*replies(1.0), *replies(1.0, ids=other)]  # in one repetition only
    runs = {"jaxserve": {"on": replies(1.0, 1.0)}, "vllm": {"on": theirs}}
    against = compare(WORKLOAD, runs)["against"]["vllm"]["on"]
    assert against["num_equal_requests"] == 1
    assert against["different_requests"] == [{"line": 2, "id": "b", "first_difference": 2}]


def test_too_few_tokens_are_no_result():
    short = replies(1.0, ids=[IDS[0], IDS[1][:3]])
    with pytest.raises(ComparisonError, match=r"line 2 asks for 4 tokens, got \[3, 4\]"):
        compare(WORKLOAD, {"jaxserve": {"on": replies(1.0)}, "vllm": {"on": short}})


def test_modes():
    assert modes(has_shared_prefix=True, shares_prefixes=True) == ["on", "off"]
    assert modes(has_shared_prefix=False, shares_prefixes=True) == ["on"]
    assert modes(has_shared_prefix=True, shares_prefixes=False) == ["off"]


def test_roofline_counts_weights_and_the_mean_context():
    request = {"prompt_token_ids": [1] * 10, "max_tokens": 20}
    machine = {"weight_bytes": 60, "kv_bytes_per_token": 2, "gemm_flops_per_s": 1.0}
    measured = [machine | {"stream_bytes_per_s": speed} for speed in (1000.0, 2000.0)]
    found = decode_roofline(request, replies(4.0, 4.0), measured)
    assert found["tokens_per_s"]["each"] == [10, 20]  # a token reads 60 + 20 * 2 bytes
    assert found["reached"]["each"] == [0.5, 0.25]


def write_workload(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    "fault",
    [{"ignore_eos": False}, {"temperature": 1}, {"prompt_token_ids": []}, {"max_tokens": 0}],
)
def test_workload_that_leaves_something_open_is_refused(tmp_path, fault):
    path = write_workload(tmp_path / "w.jsonl", [WORKLOAD[0], WORKLOAD[1] | fault])
    with pytest.raises(ComparisonError, match=r"w\.jsonl, line 2: prompt_token_ids, max_tokens"):
        read_requests(path)


def test_prompts_are_capped_only_if_asked(tmp_path):
    path = write_workload(tmp_path / "w.jsonl", WORKLOAD)
    assert [one.max_tokens for one in read_prompts(path)] == [2, 4]
    assert [one.max_tokens for one in read_prompts(path, 3)] == [2, 3]


# The table.


def result_of(**speeds: float) -> dict:
    against = {"vllm": {"on": {"speed": spread([speeds["w1"]])}}}
    return {
        "date": "2026-01-02",
        "machine": {"text": "a machine"},
        "workloads": {"w1": {"against": against, "engines": {}}},
    }


def test_table_says_what_was_reached_and_what_was_not_measured():
    startup = {
        "date": "2026-01-03",
        "machine": {"text": "m"},
        "startup": {
            "jaxserve": {"later_s": spread([4.0, 3.0, 5.0])},
            "vllm": {"later_s": spread([100.0, 80.0, 90.0])},
        },
    }
    lines = table.goals_table([result_of(w1=1.0), startup]).splitlines()
    first = "| w1, output tokens/s | vLLM | ≥ 1.1 | 1 (1 to 1) | no | 2026-01-02 | a machine |"
    assert lines[2] == first
    assert lines[-2].endswith("| ≤ 5 | 4 (3 to 5) | yes | 2026-01-03 | m |")
    assert lines[-1].endswith("| ≤ 0.1 | 0.0444 (0.03 to 0.0625) | yes | 2026-01-03 | m |")
    assert len(lines) == 2 + len(table.GOALS)
    assert sum(table.NOT_MEASURED in line for line in lines) == len(table.GOALS) - 3
    later = table.goals_table([result_of(w1=1.0), result_of(w1=1.5)]).splitlines()
    assert "| 1.5 (1.5 to 1.5) | yes |" in later[2]


def test_a_ratio_of_speeds_is_turned_into_one_of_walls():
    result = result_of(w1=1.0)
    by_mode = {"on": {"speed": spread([2.0, 1.0, 4.0])}}
    result["workloads"]["w3"] = {"against": {"vllm": by_mode}, "engines": {}}
    line = next(one for one in table.goals_table([result]).splitlines() if "w3, wall time, " in one)
    assert "| ≤ 0.9 | 0.5 (0.25 to 1) | yes |" in line


# Workers and installations.


@pytest.fixture
def start(tmp_path):
    """(name, wall times, exit status) -> an Arm of a fake worker."""
    program, log = tmp_path / "worker.py", tmp_path / "log"
    program.write_text(FAKE_WORKER)
    log.write_text("")

    def start_arm(name: str, *walls: float, status: int = 0) -> Arm:
        text = ",".join(map(str, walls))
        command = [sys.executable, program, name, log, text, str(status)]
        path = {"PYTHONPATH": str(installs.ROOT)}
        return Arm(name, command, log=tmp_path / f"{name}.err", environment=path)

    return start_arm


def test_an_arm_loads_once_and_answers_each_command(start, tmp_path):
    workload = write_workload(tmp_path / "w.jsonl", WORKLOAD)
    with start("x", 1.5, 2.5) as arm:
        arm.wait_until_ready()
        first = arm.measure(workload, prefix_caching=True)
        second = arm.measure(workload, prefix_caching=False)
        assert arm.ask(roofline=True)["stream_bytes_per_s"] == 8.0
    assert arm.versions == {"fake": "x"}
    assert (first["wall_s"], second["wall_s"]) == (1.5, 2.5)
    assert first["token_ids"] == [[5, 6], [5, 6, 7, 8]]
    if Path("/proc/stat").is_file():
        assert 0 <= first["cpu_s"] < 60
        assert first["others_cpu_s"] >= 0
    noted = (tmp_path / "log").read_text().splitlines()
    assert noted == ["x 6 tokens, cache True", "x 6 tokens, cache False", "x done"]
    assert "noise that is no reply" in (tmp_path / "x.err").read_text()


def test_an_arm_that_ends_early_is_named_with_its_status(start, tmp_path):
    workload = write_workload(tmp_path / "w.jsonl", WORKLOAD)
    with start("x", status=7) as arm:
        arm.wait_until_ready()
        with pytest.raises(PeerError, match="the x arm ended with status 7"):
            arm.measure(workload, prefix_caching=True)


def test_a_start_lasts_until_the_first_token(start, tmp_path):
    workload = write_workload(tmp_path / "w.jsonl", WORKLOAD)
    begin = time.perf_counter()
    with start("x", 1.0) as arm:
        seconds = time_start(arm, workload, begin)
    assert 0 < seconds <= time.perf_counter() - begin
    assert (tmp_path / "log").read_text().splitlines()[0] == "x 2 tokens, cache False"


def test_a_child_of_a_worker_ends_with_it(tmp_path):
    program = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    with Arm("x", [sys.executable, "-c", program], log=tmp_path / "err") as arm:
        child = arm.read()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text():
            return
        time.sleep(0.05)
    pytest.fail(f"process {child} still runs")


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_an_arm_is_asked_to_end_but_not_where_nobody_waits_for_its_run(tmp_path, is_interrupted):
    program = "import pathlib, sys; print('{}', flush=True); sys.stdin.read(); "
    program += f"pathlib.Path({str(tmp_path / 'asked')!r}).touch()"

    def use() -> None:
        with Arm("x", [sys.executable, "-c", program], log=tmp_path / "err") as arm:
            arm.read()
            if is_interrupted:
                raise KeyboardInterrupt

    if is_interrupted:
        with pytest.raises(KeyboardInterrupt):
            use()
    else:
        use()
    assert (tmp_path / "asked").exists() is not is_interrupted


def test_a_peer_is_installed_once_and_again_after_an_interruption_or_a_new_version(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(installs, "CACHE", tmp_path)
    calls = []

    def install(folder: Path) -> None:
        calls.append(folder)
        folder.mkdir(exist_ok=True)
        if len(calls) == 1:
            raise PeerError("no network")

    def peer(version: str) -> Peer:
        return Peer(name="x", version=version, install=install, command=lambda *_: [])

    with pytest.raises(PeerError, match="no network"):
        peer("1").ensure_installed()
    assert not peer("1").is_installed
    peer("1").ensure_installed()
    peer("1").ensure_installed()
    assert calls == [tmp_path / "x"] * 2
    assert peer("1").is_installed
    assert not peer("2").is_installed
    peer("2").ensure_installed()
    assert len(calls) == 3


def test_what_an_installation_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(PeerError, match=r"Python 3\.11 is needed"):
        installs.find_python("3.11")
    with pytest.raises(PeerError, match="cmake is needed, to build it"):
        installs.PEERS["llama_cpp"].install(tmp_path / "llama_cpp")
    with pytest.raises(PeerError, match=r"needs a GGUF file, and .*other\.toml names none"):
        installs.float32_gguf(tmp_path, tmp_path / "other")
    with pytest.raises(PeerError, match=r"python.* -c failed: why not"):
        installs.run_quietly([sys.executable, "-c", "raise SystemExit('why not')"])


def test_threads_are_told_to_a_peer():
    variables = installs.PEERS["vllm"].variables(4)
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"


# The script.


@pytest.fixture
def compare_with_fake(tmp_path, repository):
    """(own walls, peer's walls, flags) -> the finished script, with vLLM played by a fake."""
    home, own = tmp_path / "home", tmp_path / "own_python"
    folder = home / ".cache" / "jaxserve" / "peers" / "vllm"
    (folder / "bin").mkdir(parents=True)
    (folder / STAMP).write_text(installs.PEERS["vllm"].version + "\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "worker.py").write_text(FAKE_WORKER)
    for name in ("w1", "w2", "w3"):
        write_workload(tmp_path / f"{name}.jsonl", WORKLOAD)

    def write_python(path: Path, name: str, walls: list[float]) -> None:
        text = ",".join(map(str, walls))
        command = f'"{sys.executable}" "{tmp_path}/worker.py" {name} "{tmp_path}/log" "{text}" 3'
        path.write_text(f"#!/bin/sh\nPYTHONPATH=. exec {command}\n")
        path.chmod(0o755)

    def run(ours: list[float], theirs: list[float], *flags: str) -> subprocess.CompletedProcess:
        write_python(own, "jaxserve", ours)
        write_python(folder / "bin" / "python", "vllm", theirs)
        (tmp_path / "log").write_text("")
        given = [f"--model={tmp_path}/model", f"--workloads_folder={tmp_path}"]
        given.append(f"--own_python={own}")
        return subprocess.run(
            [sys.executable, repository / "scripts" / "bench_peers", *given, *flags],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(home)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


def test_engines_take_turns_and_the_result_goes_through_the_table(compare_with_fake, tmp_path):
    # A warm-up each; then w2 once and w3 with and without cache, twice; w3 has a warm-up too.
    ours, theirs = [9, 1, 2, 9, 1, 4, 1, 4], [9, 2, 8, 9, 3, 5, 3, 5]
    flags = ["--workloads=w2,w3", "--repetitions=2", "--output=result.json"]
    done = compare_with_fake(ours, theirs, *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert json.loads((tmp_path / "result.json").read_text()) == result
    noted = (tmp_path / "log").read_text().splitlines()
    warm = ["jaxserve 4 tokens, cache True", "vllm 4 tokens, cache True"]
    turn = ["jaxserve 6 tokens, cache True", "vllm 6 tokens, cache True"]
    both = [f"{name} 6 tokens, cache {on}" for name in ("jaxserve", "vllm") for on in (True, False)]
    assert noted[:-2] == [*warm, *turn * 2, *warm, *both * 2]
    assert sorted(noted[-2:]) == ["jaxserve done", "vllm done"]
    assert result["workloads"]["w2"]["against"]["vllm"]["on"]["speed"]["each"] == [2, 4]
    assert result["workloads"]["w3"]["cache"]["jaxserve"]["median"] == 4
    reached = result["roofline"]["reached"]["each"]
    assert reached == [0.5, 0.25]  # of 4 tokens/s: WORKLOAD[0] asks for 2 and takes 1 s, then 2 s
    assert result["versions"] == {"jaxserve": {"fake": "jaxserve"}, "vllm": {"fake": "vllm"}}
    shown = compare_with_fake([], [], f"--table={tmp_path}/result.json").stdout
    assert "| w2, tokens/s | vLLM | ≥ 1.5 | 3 (2 to 4) | yes |" in shown
    assert "| w3 | jaxserve | off | 1.5 (1.5 to 1.5) | 4 (4 to 4) | 0.5 (0.5 to 0.5) | - |" in shown
    assert "| w3 | vllm | on | 2 (2 to 2) | 3 (3 to 3) | 0.5 (0.5 to 0.5) | 2 of 2 |" in shown


def test_starts_are_timed_apart_from_the_first(compare_with_fake):
    done = compare_with_fake([1], [1], "--startup", "--repetitions=2")
    assert done.returncode == 0, done.stderr
    startup = json.loads(done.stdout)["startup"]
    assert set(startup) == {"jaxserve", "vllm"}
    assert all(len(one["later_s"]["each"]) == 2 and one["first_s"] > 0 for one in startup.values())


def test_an_engine_that_ends_early_ends_the_script(compare_with_fake):
    done = compare_with_fake([9, 1], [9], "--workloads=w1", "--repetitions=1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "bench_peers: the vllm arm ended with status 3" in done.stderr


def test_a_peer_that_is_not_installed_is_refused(compare_with_fake):
    done = compare_with_fake([], [], "--peers=transformers")
    assert done.returncode == 2
    assert "transformers is not installed; --install=transformers does it" in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--output=nowhere/x.json"], "--output=nowhere/x.json cannot be written: No such file"),
        (["--output=model"], "--output=model cannot be written: Is a directory"),
        (["--workloads="], "--workloads names none"),
        (["--workloads_folder=model"], "model/w1.jsonl is no workload: "),
        (["--num_threads=0"], "--num_threads must be at least 1, got 0"),
        (["--own_python=model/config.json"], "--own_python=model/config.json is missing"),
        (["--table=none.json"], "is not a file; scripts/bench_peers --output=none.json makes one"),
        (["--rep=3"], "unrecognized arguments: --rep=3"),
        (["--table=worker.py"], "worker.py is no result of bench_peers"),
        (["--table=w1.jsonl"], "w1.jsonl is no result of bench_peers"),
        (["--table=model/config.json"], "model/config.json is no result of bench_peers"),
    ],
)
def test_what_could_not_end_well_is_refused_before_an_engine_starts(
    compare_with_fake, tmp_path, flags, said
):
    done = compare_with_fake([9, 1], [9, 1], *flags)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "log").read_text() == ""
