"""--stats_file and --schedule_log: what is in them, what is refused, and `jaxserve replay`."""

import itertools
import json
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from jaxserve.cli import bench_offline
from jaxserve.cli.main import main
from jaxserve.cli.output_files import OutputError
from jaxserve.cli.records import LineFile, StatsFile
from tests.cli.conftest import read_records
from tests.cli.test_bench_offline import FakeCounter
from tests.cli.test_run import write_lines
from tests.fakes import make_engine

FLAGS = ["--max-num-seqs=4", "--max-num-batched-tokens=16", "--max-tokens=9", "--ignore-eos"]


@pytest.fixture
def prompts(tmp_path) -> Path:
    lines = [{"prompt": "one beginning for all, " + "x" * i} for i in range(7)]
    return write_lines(tmp_path / "in.jsonl", lines)


@pytest.fixture
def log_run(run, prompts, tmp_path):
    """Runs the prompts with a schedule log; gives the log."""

    def start(*flags: str) -> Path:
        log = tmp_path / "run.log"
        arguments = [f"--input={prompts}", f"--output={tmp_path / 'out.jsonl'}", "--overwrite"]
        assert run(*FLAGS, *arguments, f"--schedule_log={log}", *flags) == 0
        return log

    return start


def test_a_line_a_step_and_one_at_the_end(run, prompts, tmp_path, made):
    stats = tmp_path / "stats.jsonl"
    flags = [f"--stats_file={stats}", "--stats_interval_s=0", "--num-pages=40"]
    assert run(*FLAGS, *flags, f"--input={prompts}", f"--output={tmp_path / 'o'}") == 0
    lines = read_records(stats)
    num_steps = made[0].engine.stats().num_steps
    assert len(lines) == num_steps + 1
    assert [one["tokens"]["num_steps"] for one in lines[:-1]] == list(range(1, num_steps + 1))
    assert lines[-1]["tokens"]["num_output_tokens"] == 7 * 9
    times = [one["time_s"] for one in lines]
    assert times == sorted(times)
    assert lines[0]["last_step"]["num_chunk_tokens"] > 0
    assert lines[-1]["prefix_cache"]["hit_rate"] > 0.3
    assert all(0 <= one["pages"]["kv_utilisation"] <= 1 for one in lines)


def test_a_long_interval_leaves_the_last_line(run, prompts, tmp_path):
    stats = tmp_path / "stats.jsonl"
    flags = [f"--stats_file={stats}", "--stats_interval_s=1000"]
    assert run(*FLAGS, *flags, f"--input={prompts}", f"--output={tmp_path / 'o'}") == 0
    (line,) = read_records(stats)
    assert line["tokens"]["num_output_tokens"] == 7 * 9
    assert line["sequences"]["num_running"] == 0


def test_the_interval_is_kept():
    engine = make_engine()
    lines: list[str] = []
    clock = itertools.count(0, 0.25)  # each look takes a quarter of a second
    file = StatsFile(lines.append, engine.stats, 1.0, clock=lambda: next(clock))
    for _ in range(20):
        file.step_done(None)  # type: ignore[arg-type]
    times = [json.loads(line)["time_s"] for line in lines]
    gaps = [later - one for one, later in itertools.pairwise(times)]
    assert len(times) == 6, "26 looks are 6.5 seconds"
    assert min(gaps) >= 1


def test_a_log_of_several_replicas_is_refused_before_the_model_is_read(run, made, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    flags = [f"--schedule_log={log}", "--data_parallel_size=2"]
    assert run(*FLAGS, *flags, "a prompt") == 2
    assert "--data_parallel_size makes several" in capsys.readouterr().err
    assert not made
    assert not log.exists()


def test_bench_writes_both(made, model, prompts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_offline, "make_compile_counter", FakeCounter)
    stats, log = tmp_path / "s", tmp_path / "l"
    command = ["bench", "offline", f"--model={model}", f"--workload={prompts}", "--repetitions=2"]
    assert main([*command, f"--stats_file={stats}", f"--schedule_log={log}"]) == 0
    assert read_records(stats)[-1]["tokens"]["num_prompt_tokens"] > 0
    assert sum("step" in one for one in read_records(log)) == made[0].engine.stats().num_steps
    capsys.readouterr()
    assert main(["replay", f"--model={model}", f"--schedule_log={log}"]) == 0
    assert capsys.readouterr().out.startswith("the same ")


@pytest.mark.parametrize(
    "flags",
    [
        ["--temperature=0"],
        ["--temperature=0.8", "--seed=3"],
        ["--num-pages=24", "--host_kv_gib=0.3", "--preemption_mode=swap"],
        ["--num-pages=24", "--preemption_mode=recompute", "--noenable_prefix_caching"],
        ["--admission=short_first", "--max_num_partial_prefills=4", "--page_size=8"],
    ],
)
def test_a_replay_gives_the_same_tokens(log_run, model, made, capsys, flags):
    log = log_run(*flags)
    assert main(["replay", f"--model={model}", f"--schedule_log={log}"]) == 0
    out = capsys.readouterr().out
    first, again = made
    assert out.startswith(f"the same {7 * 9} tokens in {first.engine.stats().num_steps} steps")
    assert "no end" not in out
    assert again.engine.stats().num_steps == 0, "its scheduler took no part"
    assert (again.engine.executor.slots == first.engine.executor.slots).all()


def test_a_changed_token_is_found(log_run, model, made, capsys):
    log = log_run()
    *records, last = [json.loads(line) for line in log.read_bytes().splitlines()]
    step = next(one for one in records if one.get("step") == 6)
    step["outcomes"][-1][0] += 1
    log.write_text("".join(json.dumps(one) + "\n" for one in [*records, last]))
    assert main(["replay", f"--model={model}", f"--schedule_log={log}"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("step 6: request '")
    assert out.count("\n") == 1


def test_a_log_that_was_cut_at_a_lines_end_is_told(log_run, model, capsys):
    log = log_run()
    *lines, last = log.read_bytes().splitlines(keepends=True)
    assert json.loads(last) == {"end": {"num_steps": json.loads(lines[-1])["step"]}}
    log.write_bytes(b"".join(lines))
    assert main(["replay", f"--model={model}", f"--schedule_log={log}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"the same {7 * 9} tokens in ")
    assert out.endswith(" s; the log has no end: it was cut short or is still being written\n")


@pytest.mark.parametrize(
    ("number", "line", "words"),
    [
        (1, b"prompt: hello\n", "not a schedule log: Expecting value at character 1"),
        (1, b"\xff\x00\n", "not a schedule log: not UTF-8 at byte 0"),
        (1, b'{"prompt": "hello"}\n', "not the header of a schedule log of this version"),
        (
            4,
            b'{"step": 1,\n',
            "not valid JSON: Expecting property name enclosed in double quotes at",
        ),
        (4, b'{"step": 1}\n', "KeyError 'bucket'"),
    ],
)
def test_a_fault_is_told_with_file_and_line(log_run, model, capsys, number, line, words):
    log = log_run()
    lines = log.read_bytes().splitlines(keepends=True)
    lines[number - 1] = line
    log.write_bytes(b"".join(lines))
    capsys.readouterr()
    assert main(["replay", f"--model={model}", f"--schedule_log={log}"]) == 2
    err = capsys.readouterr().err
    assert f"{log}, line {number}: {words}" in err
    assert err.count("line") == 1


def test_another_model_is_refused(log_run, model, made, capsys):
    log = log_run()
    (model / "model.safetensors").write_bytes(bytes(101))
    assert main(["replay", f"--model={model}", f"--schedule_log={log}"]) == 2
    assert "is another model than the one the log was made with" in capsys.readouterr().err
    assert len(made) == 1


def test_an_engine_that_comes_out_otherwise_is_refused(log_run, model, made, capsys):
    log = log_run()
    log.write_text(
        log.read_text().replace('"attention_backend":"fake"', '"attention_backend":"xla"')
    )
    assert main(["replay", f"--model={model}", f"--schedule_log={log}"]) == 2
    assert (
        "attention_backend was 'xla' in the log and would be 'fake' now" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedule_log=x"], "--model is needed"),
        (["--model=x"], "--schedule_log is needed"),
        (["--model=x", "--schedule_log=/no/such"], "cannot read --schedule_log=/no/such: No such"),
        (["--model=x", "--schedule_log=/"], "cannot read --schedule_log=/: Is a directory"),
        (
            ["--model=x", "--schedule_log=/dev/null"],
            "/dev/null, line 1: not the header of a schedule",
        ),
        (["--model=x", "--schedule_log=x", "y"], "unexpected argument 'y'"),
    ],
)
def test_replay_says_what_is_missing(arguments, words, capsys):
    assert main(["replay", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--stats_file={tmp}"], "cannot write --stats_file={tmp}: Is a directory"),
        (["--stats_file=/no/such/s"], "cannot write --stats_file=/no/such/s: No such file"),
        (["--schedule_log=/no/such/s"], "cannot write --schedule_log=/no/such/s: No such file"),
        (["--schedule_log={tmp}/" + "x" * 300], "File name too long"),
        (["--schedule_log=-"], "--schedule_log needs the name of a file, got '-'"),
        (["--stats_file="], "--stats_file needs the name of a file, got ''"),
        (["--stats_file={tmp}/in.jsonl"], "and --input are the same file"),
        (["--stats_file={tmp}/out.jsonl"], "and --output={tmp}/out.jsonl (out.jsonl) are the same"),
        (["--stats_file={tmp}/out.jsonl.meta.json"], "(out.jsonl.meta.json) are the same file"),
        (
            ["--stats_file={tmp}/a", "--schedule_log={tmp}/./a"],
            "and --stats_file are the same file",
        ),
        (["--stats_interval_s=-1"], "--stats_interval_s must be a number of seconds >= 0, got -1"),
        (
            ["--stats_interval_s=nan"],
            "--stats_interval_s must be a number of seconds >= 0, got nan",
        ),
        (
            ["--stats_interval_s=inf"],
            "--stats_interval_s must be a number of seconds >= 0, got inf",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_before_loading(
    run, made, prompts, tmp_path, capsys, flags, words
):
    given = [flag.format(tmp=tmp_path) for flag in flags]
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert run(*FLAGS, f"--input={prompts}", f"--output={tmp_path / 'out.jsonl'}", *given) == 2
    err = capsys.readouterr().err
    assert words.format(tmp=tmp_path) in err
    assert err.count("\n") == 1
    assert made == []
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--stats_file={workload}"], "and --workload are the same file"),
        (["--output={tmp}/o", "--stats_file={tmp}/o"], "and --output are the same file"),
        (["--scheduling=static,continuous", "--schedule_log={tmp}/l"], "are for one arm"),
    ],
)
def test_bench_refuses_files_too(made, model, prompts, tmp_path, capsys, flags, words):
    given = [flag.format(tmp=tmp_path, workload=prompts) for flag in flags]
    assert main(["bench", "offline", f"--model={model}", f"--workload={prompts}", *given]) == 2
    assert words in capsys.readouterr().err
    assert made == []


def test_an_older_file_is_kept_by_a_start_that_fails(run, made, prompts, tmp_path, capsys):
    log = tmp_path / "log"
    log.write_text("older\n")
    assert run(*FLAGS, f"--input={prompts}", f"--schedule_log={log}", "--stats_file=/no/such") == 2
    assert main(["run", f"--model={tmp_path}/none", f"--schedule_log={log}", "hello"]) == 2
    assert log.read_text() == "older\n"


def test_a_resumed_run_keeps_the_files_of_its_earlier_parts(run, model, prompts, tmp_path, capsys):
    out, stats, log = (tmp_path / name for name in ("out.jsonl", "stats", "log"))
    flags = [f"--input={prompts}", f"--output={out}", f"--stats_file={stats}"]
    flags += [f"--schedule_log={log}", *FLAGS]
    assert run(*flags) == 0
    first = stats.read_bytes(), log.read_bytes()
    for number in (2, 3):
        out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:4]))
        assert run(*flags, "--resume") == 0
        assert (stats.read_bytes(), log.read_bytes()) == first
        err = capsys.readouterr().err
        for flag, path in (("stats_file", stats), ("schedule_log", log)):
            assert f"--{flag}={path} holds an earlier part" in err
            assert f"goes to {path}.{number}\n" in err
        assert read_records(Path(f"{stats}.{number}"))[-1]["tokens"]["num_output_tokens"] == 3 * 9
        command = ["replay", f"--model={model}", f"--schedule_log={log}.{number}"]
        assert main(command) == 0
    assert run(*flags, "--resume") == 0, "nothing is left to do"
    assert not Path(f"{log}.4").exists()
    assert run(*flags, "--overwrite") == 0
    assert log.read_bytes() != first[1], "a new run replaces them"
    assert len(read_records(log)) == len(first[1].splitlines())


def test_an_empty_file_is_no_earlier_part(run, prompts, tmp_path):
    log = tmp_path / "log"
    log.touch()
    flags = [f"--input={prompts}", f"--output={tmp_path / 'o'}", f"--schedule_log={log}"]
    assert run(*FLAGS, *flags, "--resume") == 0
    assert "step" in log.read_text()
    assert not Path(f"{log}.2").exists()


def test_the_next_part_must_not_be_another_file(run, made, prompts, tmp_path, capsys):
    log = tmp_path / "log"
    log.write_text("earlier\n")
    flags = [f"--input={prompts}", f"--output={log}.2", f"--schedule_log={log}", "--resume"]
    assert run(*flags) == 2
    assert f"--schedule_log={log}.2 and --output={log}.2" in capsys.readouterr().err
    assert made == []


def test_a_kill_leaves_whole_lines(start, tmp_path):
    stats, log = tmp_path / "stats", tmp_path / "log"
    flags = [f"--stats_file={stats}", "--stats_interval_s=0", f"--schedule_log={log}"]
    process = start(0.01, *flags, "--max-tokens=100", "hello")
    deadline = time.monotonic() + 60
    while not stats.exists() or stats.stat().st_size < 3000:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(read_records(stats)) > 1
    assert "step" in read_records(log)[-1]


def test_a_stop_leaves_a_log_with_its_end(start, tmp_path):
    log = tmp_path / "log"
    process = start(0.01, f"--schedule_log={log}", "--max-tokens=1000", "--ignore-eos", "hello")
    deadline = time.monotonic() + 60
    while not log.exists() or b'"step":' not in log.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    *_, last_step, end = read_records(log)
    assert end == {"end": {"num_steps": last_step["step"]}}


def test_a_full_disk_ends_the_run_and_leaves_whole_lines(tmp_path):
    path = tmp_path / "lines"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    file = LineFile(path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (25, before[1]))
        with pytest.raises(OutputError, match=f"cannot write {path}: File too large"):
            write_until_it_fails(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
        file.close()
    assert path.read_text() == "0123456789\n" * 2


def write_until_it_fails(file: LineFile) -> None:
    for _ in range(9):
        file.write("0123456789\n")


def test_a_pipe_may_be_written(run, prompts, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        flags = [f"--stats_file={pipe}", "--stats_interval_s=100"]
        assert run(*FLAGS, *flags, f"--input={prompts}", f"--output={tmp_path / 'o'}") == 0
        assert json.loads(os.read(reader, 10**5))["tokens"]["num_output_tokens"] == 7 * 9
    finally:
        os.close(reader)


def test_nobody_looks_on_any_more(run, made, tmp_path):
    assert run("--max-tokens=3", f"--stats_file={tmp_path / 's'}", "hello") == 0
    assert made[0].engine.observers == []
