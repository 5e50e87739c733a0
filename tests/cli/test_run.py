"""`jaxserve run` over the fake engine: what goes in, what comes out, and the exit code."""

import json
import os
from pathlib import Path

import pytest

from jaxserve.cli.output_files import meta_path, partial_path
from tests.cli.conftest import read_records
from tests.cli.fake_llm import BREAKS_THE_ENGINE, FakeLLM, encode, expected_text
from tests.fakes import expected_tokens


def write_lines(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_one_prompt_prints_its_text_and_nothing_else(run, capsys):
    assert run("--max-tokens=5", "a-b") == 0
    captured = capsys.readouterr()
    assert captured.out == expected_text("a-b", 5) + "\n"
    assert "1 done, 0 failed" in captured.err


def test_several_prompts_print_in_order_each_under_its_prompt(run, capsys):
    prompts = ["a long one, that is done last", "b", "two\nlines"]
    assert run("--max-tokens=5", "--max-num-seqs=2", *prompts) == 0
    texts = [expected_text(prompt, 5) for prompt in prompts]
    assert capsys.readouterr().out == (
        f"> {prompts[0]}\n{texts[0]}\n\n> b\n{texts[1]}\n\n> two\n> lines\n{texts[2]}\n"
    )


def test_text_is_printed_as_it_comes(start):
    process = start(0.1, "--max-tokens=20", "hello")
    expected = expected_text("hello", 20)
    read = os.read(process.stdout.fileno(), 3).decode()
    assert process.poll() is None, "nothing came before the end"
    out, _ = process.communicate(timeout=30)
    assert read + out == expected + "\n"


def test_a_prompt_that_fails_is_said_and_the_others_go_on(run, capsys):
    assert run("--max-tokens=3", "--max-model-len=8", "much too long", "ok", "") == 1
    captured = capsys.readouterr()
    assert expected_text("ok", 3) in captured.out
    assert "prompt 1: " in captured.err
    assert "prompt 3: the prompt is empty" in captured.err


def test_chat_wraps_prompts(run, capsys):
    assert run("--max-tokens=3", "--chat", "hi") == 0
    assert capsys.readouterr().out == expected_text("user: hi\n", 3) + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ['--tools=[{"type": "function", "function": {"name": "f"}}]', "hi"],
            "--tools is for chats",
        ),
        (["--input_format=openai", "hi"], "--input_format=openai is for --input"),
        (["--input="], "--input=: must name a file, or be -"),
        (["--output=", "hi"], "--output=: must name a file, or be -"),
    ],
)
def test_flags_that_could_mean_nothing_are_refused(run, capsys, arguments, words):
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err


def test_prompts_with_an_output_do_both(run, capsys, tmp_path):
    output = tmp_path / "o.jsonl"
    assert run("--max-tokens=3", f"--output={output}", "hi", "ho") == 0
    assert expected_text("ho", 3) in capsys.readouterr().out
    assert [r["text"] for r in read_records(output)] == [expected_text(x, 3) for x in ("hi", "ho")]
    assert run("--max-tokens=3", "--output=-", "hi") == 0
    assert json.loads(capsys.readouterr().out)["text"] == expected_text("hi", 3)


def test_records(run, tmp_path):
    lines = [
        {"id": "a", "prompt": "hello", "max_tokens": 4, "logprobs": True},
        {"prompt": [5, 6, 7], "max_tokens": 2},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run("--max-tokens=3", f"--input={source}", f"--output={output}") == 0
    records = read_records(output)
    assert records[0] == {
        "index": 0,
        "id": "a",
        "text": expected_text("hello", 4),
        "token_ids": expected_tokens(encode("hello"), 4),
        "finish_reason": "length",
        "num_prompt_tokens": 5,
        "num_cached_tokens": 0,
        "num_output_tokens": 4,
        "logprobs": [-1.0] * 4,
    }
    assert records[1]["token_ids"] == expected_tokens([5, 6, 7], 2)
    assert records[2]["text"] == expected_text("user: hi\n", 3)
    assert [record["id"] for record in records] == ["a", None, None]
    assert not partial_path(output).exists()


def test_several_outputs_have_a_list_in_the_record(run, tmp_path):
    lines = [
        {"id": "a", "prompt": "hello", "n": 3, "max_tokens": 4, "logprobs": True},
        {"prompt": "hi"},
        {"prompt": "ho", "n": 1},
    ]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run("--n=2", "--max-tokens=3", f"--input={source}", f"--output={output}") == 0
    records = read_records(output)
    tokens = expected_tokens(encode("hello"), 4)
    assert records[0] == {
        "index": 0,
        "id": "a",
        "outputs": [
            {
                "index": index,
                "text": expected_text("hello", 4),
                "token_ids": tokens,
                "finish_reason": "length",
                "logprobs": [-1.0] * 4,
            }
            for index in range(3)
        ],
        "num_prompt_tokens": 5,
        "num_cached_tokens": 0,
        "num_output_tokens": 12,
    }
    assert [one["text"] for one in records[1]["outputs"]] == [expected_text("hi", 3)] * 2
    assert "logprobs" not in records[1]["outputs"][0]
    assert (records[2]["text"], "outputs" in records[2]) == (expected_text("ho", 3), False)


def test_several_outputs_are_printed_behind_their_numbers(run, capsys):
    assert run("--n=3", "--max-tokens=5", "a-b") == 0
    text = expected_text("a-b", 5)
    assert capsys.readouterr().out == f"[0] {text}\n[1] {text}\n[2] {text}\n"
    assert run("--n=2", "--max-tokens=5", "--max-num-seqs=2", "a", "much too long" * 50, "b") == 1
    captured = capsys.readouterr()
    a, b = expected_text("a", 5), expected_text("b", 5)
    assert captured.out == (
        f"> a\n[0] {a}\n[1] {a}\n\n> {'much too long' * 50}\n[0] \n[1] \n\n> b\n[0] {b}\n[1] {b}\n"
    )
    assert "prompt 2: " in captured.err


def test_priority_and_salt_are_fields_of_a_line(run, made, tmp_path):
    prompt = {"prompt": "a prompt of more than a page", "max_tokens": 2}
    lines = [
        prompt | {"cache_salt": "x", "priority": 5},
        prompt | {"cache_salt": "x", "priority": -1},
        prompt | {"cache_salt": "y"},
        prompt | {"cache_salt": None, "priority": None},
        prompt | {"cache_salt": ""},
        prompt | {"cache_salt": 7},
        prompt | {"priority": 1.5},
        prompt | {"priority": 2**31},
    ]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    flags = ["--admission=priority", "--max-num-seqs=1"]
    assert run(*flags, f"--input={source}", f"--output={output}") == 1
    records = read_records(output)
    assert [record.get("error", {}).get("param") for record in records] == [
        *[None] * 4,
        "cache_salt",
        "cache_salt",
        "priority",
        "priority",
    ]
    # The second of the salt's lines runs first; the other finds all its pages.
    cached = [record["num_cached_tokens"] for record in records[:4]]
    assert cached[0] > 0
    assert cached[1:] == [0, 0, 0]


@pytest.mark.parametrize("n", [1, 3])
def test_a_line_whose_logits_are_not_finite_gets_an_error_record(run, made, tmp_path, n):
    bad = expected_tokens(encode("hi"), 3)[1]
    lines = [{"id": "bad", "prompt": "hi"}, {"prompt": "ho"}]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    FakeLLM.poison = [bad]
    try:
        assert run(f"--n={n}", "--max-tokens=4", f"--input={source}", f"--output={output}") == 1
    finally:
        FakeLLM.poison = []
    error, good = read_records(output)
    assert error["id"] == "bad"
    which = "" if n == 1 else "output 0 of 3: "
    assert error["error"] == {
        "message": f"line 1: {which}the model computed NaN or infinite values after 2 output tokens",
        "type": "server_error",
        "param": None,
        "code": "non_finite_logits",
    }
    assert "error" not in good


TWELVE_LINES = "\r\n".join(
    [
        '\ufeff{"id": "first", "prompt": "hello", "max_tokens": 4}',
        "[1,2]",
        "null",
        '"x"',
        "{broken",
        "",
        '{"id": "first", "prompt": "again"}',
        '{"prompt": "no id", "max_tokens": 2}',
        '{"id": "u", "prompt": "ok", "colour": "blue", "max_tokens": 2}',
        json.dumps({"id": "long", "prompt": "x" * 100}),
        '{"id": "s", "prompt": "ok", "stream": true, "max_tokens": 2}',
        '{"id": "e\u2028", "prompt": "emoji 😀 and \u2028 in it", "max_tokens": 3}',
    ]
).encode()


def test_c45_twelve_lines_each_get_their_record(run, tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(TWELVE_LINES)
    flags = ["--max-model-len=64", f"--input={source}"]
    assert run(*flags, f"--output={output}") == 1
    records = read_records(output)
    assert [record["index"] for record in records] == list(range(12))
    good = {index: record for index, record in enumerate(records) if "error" not in record}
    assert list(good) == [0, 7, 8, 10, 11]
    assert good[0]["text"] == expected_text("hello", 4)
    assert good[11]["text"] == expected_text("emoji 😀 and \u2028 in it", 3)
    ids = ["first", None, None, None, None, None, "first", None, "u", "long", "s", "e\u2028"]
    assert [record["id"] for record in records] == ids
    for index, record in enumerate(records):
        if "error" in record:
            assert list(record) == ["index", "id", "error"]
            assert list(record["error"]) == ["message", "type", "param", "code"]
            assert record["error"]["message"].startswith(f"line {index + 1}: ")
    assert "colour" in (err := capsys.readouterr().err)
    assert "stream" in err
    assert "5 done, 7 failed" in err

    again = tmp_path / "again.jsonl"
    assert run(*flags, "--max-num-seqs=2", f"--output={again}") == 1
    assert again.read_bytes() == output.read_bytes()


def test_c06_c07_lines_the_engine_refuses_get_a_record_and_the_others_go_on(run, tmp_path):
    lines = [{"prompt": ""}, {"prompt": []}, {"prompt": "ok", "max_tokens": 2}, {"messages": []}]
    lines += [{"prompt": [1] * n, "max_tokens": m} for n in (15, 16, 17) for m in (0, 1, 2)]
    lines += [{"prompt": [10**6]}, {"prompt": [-1]}]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run("--max-model-len=16", f"--input={source}", f"--output={output}") == 1
    records = read_records(output)
    assert ["error" in record for record in records[:4]] == [True, True, False, True]
    lengths = [record.get("num_output_tokens", "error") for record in records[4:13]]
    assert lengths == [0, 1, 1, 0, "error", "error", "error", "error", "error"]
    assert all("error" in record for record in records[13:])


def test_text_input(run, tmp_path):
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_bytes("first\n\n{}\nlast \u2028 one".encode())
    flags = ["--input-format=text", f"--input={source}", f"--output={output}", "--max-tokens=2"]
    assert run(*flags) == 1
    texts = [record.get("text") for record in read_records(output)]
    assert texts == [
        expected_text(x, 2) if x else None for x in ("first", "", "{}", "last \u2028 one")
    ]


def test_an_empty_input_is_done(run, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.touch()
    assert run(f"--input={source}", f"--output={output}") == 0
    assert output.read_bytes() == b""


def test_stdin_to_stdout(start):
    process = start(0.0, "--input=-", "--max-tokens=2")
    out, err = process.communicate('{"prompt": "a"}\n{"prompt": 5}\n{"prompt": "b"}', timeout=30)
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["index"] for record in records] == [0, 1, 2]
    assert records[2]["text"] == expected_text("b", 2)
    assert process.returncode == 1, err


def test_a_slow_pipe_is_answered_line_by_line(start):
    process = start(0.0, "--input=-", "--max-tokens=2")
    for index, prompt in enumerate(["a", "b", "c"]):
        process.stdin.write(json.dumps({"prompt": prompt}) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["index"] == index
    assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == 0


def test_the_engine_never_holds_more_than_a_few_requests(run, made, tmp_path):
    lines = [{"prompt": "ab", "max_tokens": 1 + i % 5} for i in range(200)]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run("--max-num-seqs=4", f"--input={source}", f"--output={output}") == 0
    assert len(read_records(output)) == 200
    assert made[0].most_requests == 8


@pytest.mark.parametrize("scheduling", ["static", "continuous"])
def test_order_is_the_inputs_whatever_finishes_first(run, tmp_path, scheduling):
    lines = [{"prompt": f"p{i}", "max_tokens": 1 + 37 * i % 50} for i in range(30)]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    flags = [f"--scheduling={scheduling}", "--max-num-seqs=6"]
    assert run(*flags, f"--input={source}", f"--output={output}") == 0
    texts = [record["text"] for record in read_records(output)]
    assert texts == [expected_text(x["prompt"], x["max_tokens"]) for x in lines]


def test_finished_work_is_not_destroyed(run, tmp_path, capsys):
    source, output = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    flags = [f"--input={source}", f"--output={output}", "--max-tokens=2"]
    assert run(*flags) == 0
    before = output.read_bytes()
    assert run(*flags) == 2
    assert "holds results already" in capsys.readouterr().err
    assert output.read_bytes() == before
    assert run(*flags, "--overwrite", "--max-tokens=3") == 0
    assert read_records(output)[0]["num_output_tokens"] == 3
    assert run(*flags, "--overwrite", "--resume") == 2
    assert run(f"--input={source}", f"--output={source}") == 2
    assert "is the input itself" in capsys.readouterr().err


def test_resume_of_a_finished_run_does_nothing(run, made, tmp_path, capsys):
    lines = [{"prompt": "a"}, {}]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    flags = [f"--input={source}", f"--output={output}", "--max-tokens=2", "--resume"]
    assert run(*flags) == 1  # nothing to resume yet: it starts
    before = output.read_bytes()
    assert len(made) == 1
    assert run(*flags) == 1  # a line failed then
    assert len(made) == 1, "a model was loaded for nothing"
    said = f"resuming: all 2 lines of {output} were done before, 1 of them failed\n"
    assert capsys.readouterr().err.endswith(said)
    assert output.read_bytes() == before


def test_resume_tells_of_failures_in_the_earlier_run(run, tmp_path, capsys):
    lines = [{"prompt": "a"}, {}, {"prompt": 5}, {"prompt": "b"}, {"prompt": "c"}, {"prompt": 6}]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    flags = [f"--input={source}", f"--output={output}", "--max-tokens=2"]
    assert run(*flags) == 1
    assert "resuming" not in (err := capsys.readouterr().err)
    assert "hold errors" not in err, "the count of this run says it all"
    records = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(records[:4]))
    assert run(*flags, "--resume") == 1
    err = capsys.readouterr().err
    assert f"resuming: 4 of 6 lines of {output} were done before, 2 of them failed\n" in err
    assert "1 done, 1 failed: " in err
    assert err.endswith("; 3 of 6 lines hold errors\n")
    output.write_bytes(records[0])
    assert run(*flags, "--resume") == 1
    err = capsys.readouterr().err
    assert f"resuming: 1 of 6 lines of {output} were done before\n" in err
    assert "2 done, 3 failed: " in err
    assert "hold errors" not in err
    assert output.read_bytes() == b"".join(records)


def test_resumed_prompts_print_those_that_were_not_done(run, tmp_path, capsys):
    output = tmp_path / "o.jsonl"
    flags = [f"--output={output}", "--max-tokens=3"]
    assert run(*flags, "a", "b", "c") == 0
    records = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(records[0])
    partial_path(output).write_bytes(records[2])
    capsys.readouterr()
    assert run(*flags, "--resume", "a", "b", "c") == 0
    assert capsys.readouterr().out == f"> b\n{expected_text('b', 3)}\n"
    assert output.read_bytes() == b"".join(records)
    assert run(*flags, "--resume", "a", "b", "d") == 2
    assert "the prompts have changed; give --overwrite" in capsys.readouterr().err


def test_stop_token_ids_are_defaults_for_lines(run, tmp_path):
    tokens = expected_tokens(encode("hello"), 6)
    lines = [{"prompt": "hello"}, {"prompt": "hello", "stop_token_ids": []}]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    flags = [f"--input={source}", f"--output={output}", "--max-tokens=6", "--ignore-eos"]
    assert run(*flags, f"--stop-token-ids={tokens[2]},1", "--stop-token-ids=2") == 0
    records = read_records(output)
    first = min(tokens.index(i) for i in (tokens[2], 1, 2) if i in tokens)
    assert records[0]["token_ids"] == tokens[: first + 1]
    assert records[0]["finish_reason"] == "stop"
    assert records[1]["token_ids"] == tokens


def test_a_directory_that_is_no_checkpoint_does_not_hide_the_model_of_that_name(
    run, made, model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    model.rename(tmp_path / "checkpoints" / "named")
    (tmp_path / "named").mkdir()
    source, output = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    flags = ["--model=named", f"--input={source}", f"--output={output}", "--max-tokens=1"]
    assert run(*flags) == 0
    output.write_bytes(b"")
    partial_path(output).write_text("x")
    (tmp_path / "checkpoints" / "named" / "model.safetensors").write_bytes(bytes(99) + b"x")
    assert run(*flags, "--resume") == 2, "the fingerprint was that of another directory"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--temperature=0.5"], ["another sampling", "temperature: 1.0 then, 0.5 now"]),
        (["--n=2"], ["another sampling", "n: 1 then, 2 now"]),
        (["--seed=1"], ["another sampling", "seed: 0 then, 1 now"]),
        (["--dtype=bfloat16"], ["another sampling", "dtype"]),
        (["--input-format=text"], ["another input", "is_text: False then, True now"]),
        (["--stop-token-ids=3"], ["another sampling", "stop_token_ids: [] then, [3] now"]),
        ("input", ["the input file has changed; give --overwrite"]),
        ("model", ["the model has changed; give --overwrite"]),
    ],
)
def test_resume_refuses_another_run_by_name(run, model, tmp_path, capsys, change, words):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    output = tmp_path / "out.jsonl"
    flags = [f"--input={source}", f"--output={output}", "--max-tokens=2"]
    assert run(*flags) == 0
    output.write_bytes(output.read_bytes().split(b"\n")[0] + b"\n")
    if change == "input":
        write_lines(source, [{"prompt": "a"}, {"prompt": "c"}])
    elif change == "model":
        (model / "model.safetensors").write_bytes(bytes(99) + b"x")
    capsys.readouterr()
    extra = change if isinstance(change, list) else []
    assert run(*flags, *extra, "--resume") == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words), err
    assert len(read_records(output)) == 1
    if isinstance(change, list):
        # What does not decide the output may change: the pool, the step's limits.
        assert run(*flags, "--num-pages=300", "--max-num-seqs=3", "--resume") == 0
        assert len(read_records(output)) == 2


def test_resume_refuses_an_engine_that_would_answer_otherwise(run, tmp_path, capsys):
    lines = [{"prompt": "a", "max_tokens": 100}] * 2
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    flags = [f"--input={source}", f"--output={output}"]
    assert run(*flags, "--num-pages=9") == 0
    records = output.read_bytes().splitlines(keepends=True)
    torn = records[0] + records[1][:9]
    output.write_bytes(torn)
    files = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for num_pages, now in ((300, 128), (5, 16)):
        capsys.readouterr()
        assert run(*flags, "--resume", f"--num-pages={num_pages}") == 2
        err = capsys.readouterr().err
        assert f"max_request_tokens: 32 then, {now} now; set --max_model_len, --num_pages" in err
        assert "--overwrite" in err
        found = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        assert found == files, "a refused resume changed a file"
    assert run(*flags, "--resume", "--num-pages=9") == 0
    assert output.read_bytes() == b"".join(records)


@pytest.mark.parametrize("field", ["dtype", "kv_cache_dtype"])
def test_resume_refuses_another_dtype_that_auto_chose(run, tmp_path, capsys, field):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    output = tmp_path / "out.jsonl"
    flags = [f"--input={source}", f"--output={output}", "--max-tokens=2"]
    assert run(*flags) == 0
    output.write_bytes(output.read_bytes().splitlines(keepends=True)[0])
    meta = json.loads(meta_path(output).read_text())
    dtype = meta["served"][field]
    meta["served"][field] = "float8"
    meta_path(output).write_text(json.dumps(meta))
    capsys.readouterr()
    assert run(*flags, "--resume") == 2
    assert f"{field}: 'float8' then, '{dtype}' now; set --{field}" in capsys.readouterr().err


def test_resume_needs_an_input_that_stays(start, tmp_path):
    process = start(0.0, "--input=-", f"--output={tmp_path}/o.jsonl", "--resume")
    _, err = process.communicate("", timeout=30)
    assert process.returncode == 2
    assert "--resume cannot continue a run that read a pipe" in err


def test_a_broken_engine_loses_nothing_that_was_finished(run, tmp_path, capsys):
    lines = [{"prompt": "a", "max_tokens": 2}, {"prompt": BREAKS_THE_ENGINE, "max_tokens": 100}]
    lines += [{"prompt": "b", "max_tokens": 2}] * 9
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run("--max-num-seqs=3", f"--input={source}", f"--output={output}") == 2
    assert read_records(output)[0]["text"] == expected_text("a", 2)
    waiting = [record["index"] for record in read_records(partial_path(output))]
    assert waiting
    assert 1 not in waiting
    num_in_output = len(read_records(output))
    assert min(waiting) > num_in_output
    err = capsys.readouterr().err
    assert "jaxserve run: RuntimeError: the device is gone with a long story\n" in err
    assert f"stopped by an error: {num_in_output} of 11 lines are in {output}, " in err
    assert f", {len(waiting)} more wait" in err
    assert "--resume" in err
    assert "Traceback" not in err
    assert run("--verbosity=1", BREAKS_THE_ENGINE) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_failed_start_changes_no_file(run, model, tmp_path):
    source, output = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    flags = [f"--input={source}", f"--output={output}", "--overwrite"]
    assert run(*flags, "--num-pages=1") == 2
    assert not output.exists(), "the file that was locked stays"
    output.write_text('{"index": 0}\n')
    assert run(*flags, "--num-pages=1") == 2
    model.joinpath("config.json").unlink()
    model.joinpath("model.safetensors").unlink()
    model.rmdir()
    assert run(*flags) == 2
    assert output.read_text() == '{"index": 0}\n'
    assert not meta_path(output).exists()


def test_a_full_disk_ends_with_a_clear_line(run, tmp_path, capsys):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    assert run(f"--input={source}", "--output=/dev/full") == 2
    assert "jaxserve run: cannot write /dev/full: No space left" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--output=-", "--max-tokens=3"], ["--max-tokens=99"]])
def test_a_closed_pipe_ends_with_a_clear_line(start, flags):
    process = start(0.05, *flags, "a", "b", "c", "d")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=30) == 2
    process.stderr.close()
    process.stdin.close()
    assert "jaxserve run: stdout was closed before the end\n" in err
    assert "Traceback" not in err
    assert "Exception ignored" not in err
