"""The flags of `SamplingParams`: every field is one, and each value says where it came from."""

import dataclasses
import json

import pytest

from jaxserve.cli.arguments import UsageError, parse_arguments
from jaxserve.cli.run import run_flags
from jaxserve.cli.sampling_flags import REQUEST_FIELDS, SAMPLING_FIELDS, given_sampling
from jaxserve.errors import InvalidRequestError
from jaxserve.request import SamplingParams
from tests.cli.conftest import read_records
from tests.cli.fake_llm import decode, encode, expected_text
from tests.fakes import expected_tokens

TOOL = {"type": "function", "function": {"name": "now"}}


def given(*arguments):
    values = run_flags()
    parse_arguments([*arguments, "a prompt"], values)
    return given_sampling(values)


def test_every_field_of_a_request_is_a_flag():
    assert set(SAMPLING_FIELDS) | set(REQUEST_FIELDS) <= set(run_flags())


def test_nothing_is_given_until_it_is():
    assert given() == {}
    assert given("--temperature=1.0") == {"temperature": 1.0}


FLAGS = [
    ("--max_tokens=5", 5),
    ("--min-tokens=2", 2),
    ("--temperature=0.5", 0.5),
    ("--top_k=-1", -1),
    ("--top_p=0", 0),
    ("--min_p=0.1", 0.1),
    ("--presence_penalty=-2", -2),
    ("--frequency_penalty=0.5", 0.5),
    ("--repetition_penalty=1.2", 1.2),
    ('--logit_bias={"5": -100, "6": 1.5}', {"5": -100, "6": 1.5}),
    ("--allowed_token_ids=5,6", [5, 6]),
    ("--allowed_token_ids=[5, 6]", [5, 6]),
    ("--bad_words=one,two", ["one", "two"]),
    ('--bad_words=["one, two", [17, 4]]', ["one, two", [17, 4]]),
    ("--stop=a, b", ["a, b"]),
    ("--stop_token_ids=1,2", [1, 2]),
    ("--include_stop_str_in_output", True),
    ("--ignore_eos", True),
    ("--noskip_special_tokens", False),
    ("--logprobs", True),
    ("--nologprobs", False),
    ("--logprobs=5", 5),
    ("--logprobs=0", 0),
    ("--prompt_logprobs=3", 3),
    ("--processed_logprobs", True),
    ("--echo", True),
    ('--structured_outputs={"regex": "[0-9]+"}', {"regex": "[0-9]+"}),
    ("--n=3", 3),
    ("--priority=-4", -4),
    ("--cache_salt=s", "s"),
    ("--tools=" + json.dumps([TOOL]), [TOOL]),
]


@pytest.mark.parametrize(("argument", "value"), FLAGS)
def test_a_flag_gives_its_field(argument, value):
    name = argument.lstrip("-").partition("=")[0].replace("-", "_").removeprefix("no")
    assert given(argument) == {name: value}
    assert type(given(argument)[name]) is type(value) or name == "top_p" or "penalty" in name


def test_lists_can_be_repeated():
    assert given("--stop-token-ids=1,2", "--stop_token_ids", "3")["stop_token_ids"] == [1, 2, 3]
    assert given("--bad_words=a", '--bad_words=["b,c"]')["bad_words"] == ["a", "b,c"]
    assert given("--stop=a", "--stop=b")["stop"] == ["a", "b"]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--temperature=hot", "must be a number"),
        ("--top_k=a", "must be an integer"),
        ("--logit_bias=5", "must be a JSON object"),
        ("--logit_bias={", "must be a JSON object"),
        ("--logit_bias=[1]", "must be a JSON object"),
        ("--tools={}", "must be a JSON array"),
        ("--structured_outputs=x", "must be a JSON object"),
        ("--allowed_token_ids=a", "must be integers with commas between them, or a JSON array"),
        ("--bad_words=[1", "must be texts with commas between them, or a JSON array"),
        ("--logprobs=many", "must be true, false or an integer"),
        ("--echo=5", "must be true or false"),
        ("--generation_config=some", "generation_config"),
    ],
)
def test_a_flag_that_is_no_such_value_is_refused(argument, words):
    with pytest.raises(UsageError, match=words):
        given(argument)


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("--temperature=-1", "temperature"),
        ("--temperature=nan", "temperature"),
        ("--stop_token_ids=-1", "stop_token_ids"),
        ("--allowed_token_ids=[1.5]", "allowed_token_ids"),
        ('--logit_bias={"a": 1}', "logit_bias"),
        ("--logprobs=21", "logprobs"),
        ("--priority=4294967296", "priority"),
        ("--cache_salt=", "cache_salt"),
        ('--tools=[{"type": "function"}]', "tools"),
    ],
)
def test_a_flag_outside_its_range_is_named(argument, name):
    with pytest.raises(InvalidRequestError) as caught:
        given(argument)
    assert caught.value.param == name


def explained(text):
    """field -> (value, source) of a table."""
    rows = [line.split(None, 1) for line in text.splitlines()[1:-1]]
    table = {}
    for name, rest in rows:
        value, end = json.JSONDecoder().raw_decode(rest)
        table[name] = (value, rest[end:].strip())
    return table


def test_explain_sampling_says_what_every_field_is_and_where_it_came_from(run, model, made, capsys):
    (model / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 50, "max_new_tokens": 9}'
    )
    assert run("--explain_sampling", "--top_k=5", "--stop=x") == 0
    captured = capsys.readouterr()
    table = explained(captured.out)
    assert table.keys() == set(SAMPLING_FIELDS) | set(REQUEST_FIELDS)
    assert table["temperature"] == (0.6, "generation_config.json")
    assert table["max_tokens"] == (9, "generation_config.json")
    assert table["top_k"] == (5, "--top_k")
    assert table["stop"] == (["x"], "--stop")
    assert table["top_p"] == (1.0, "default")
    assert table["seed"] == (None, "each line's own: from --seed (0) and its index")
    rest = set(table) - {"temperature", "max_tokens", "top_k", "stop", "seed"}
    fields = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
    for name in rest:
        value, source = table[name]
        assert source == "default"
        assert name in REQUEST_FIELDS or value == json.loads(json.dumps(fields[name]))
    assert captured.err == ""
    assert not made, "it loads no model"
    assert run("--explain_sampling", "--generation_config=none") == 0
    assert explained(capsys.readouterr().out)["temperature"] == (1.0, "default")


def test_explain_sampling_before_a_run_goes_to_stderr(run, capsys):
    assert run("--explain_sampling", "--max_tokens=3", "hi") == 0
    captured = capsys.readouterr()
    assert captured.out == expected_text("hi", 3) + "\n"
    assert "--max_tokens" in captured.err


def test_a_line_beats_a_flag_which_beats_the_checkpoint(run, model, tmp_path):
    (model / "generation_config.json").write_text('{"max_new_tokens": 5}')
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "hi"}\n{"prompt": "hi", "max_tokens": 2}\n')

    def lengths(*arguments):
        assert run(f"--input={source}", f"--output={output}", "--overwrite", *arguments) == 0
        return [record["num_output_tokens"] for record in read_records(output)]

    assert lengths() == [5, 2]
    assert lengths("--max_tokens=4") == [4, 2]
    assert lengths("--generation_config=none", "--max_model_len=12") == [10, 2]


def test_a_bad_recommendation_is_said_at_start(run, model, made, capsys):
    (model / "generation_config.json").write_text('{"top_p": 7}')
    assert run("hi") == 2
    assert "generation_config.json: top_p must be in [0, 1], got 7" in capsys.readouterr().err
    assert run("--generation_config=none", "--max_tokens=1", "hi") == 0
    (model / "generation_config.json").write_text('{"max_new_tokens": 2}')
    assert run("--min_tokens=3", "hi") == 2
    assert "min_tokens must be at most max_tokens (2), got 3" in capsys.readouterr().err


def test_resume_compares_what_lines_start_from(run, model, tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "hi"}\n')
    arguments = [f"--input={source}", f"--output={output}", "--max_tokens=2"]
    assert run(*arguments) == 0
    assert run(*arguments, "--resume", "--temperature=1.0") == 0, "the default, written out"
    assert run(*arguments, "--resume", "--stop=x") == 2
    assert "stop: [] then, ['x'] now" in capsys.readouterr().err


def test_echo_in_records_and_in_print(run, tmp_path, capsys):
    text = decode(encode("hi")) + expected_text("hi", 3)
    assert run("--echo", "--max_tokens=3", "--n=2", "hi") == 0
    assert capsys.readouterr().out == f"[0] {text}\n[1] {text}\n"
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = {"prompt": "hi", "echo": True, "max_tokens": 3, "logprobs": True}
    source.write_text(json.dumps(line) + "\n" + json.dumps(line | {"n": 2}) + "\n")
    assert run(f"--input={source}", f"--output={output}") == 0
    one, several = read_records(output)
    ids = encode("hi") + expected_tokens(encode("hi"), 3)
    assert (one["text"], one["token_ids"]) == (text, ids)
    assert (one["num_prompt_tokens"], one["num_output_tokens"]) == (2, 3)
    assert one["logprobs"] == [-1.0] * 3
    assert [o["text"] for o in several["outputs"]] == [text] * 2
    assert several["num_output_tokens"] == 6


def test_tools_reach_lines_with_messages_alone(run, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    other = {"type": "function", "function": {"name": "later"}}
    lines = [
        {"messages": messages},
        {"messages": messages, "tools": [other]},
        {"prompt": "hi"},
        {"prompt": "hi", "tools": [other]},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [f"--input={source}", f"--output={output}", "--max_tokens=2"]
    assert run(*arguments, "--tools=" + json.dumps([TOOL])) == 1
    records = read_records(output)
    assert records[0]["text"] == expected_text("now()\nuser: hi\n", 2)
    assert records[1]["text"] == expected_text("later()\nuser: hi\n", 2)
    assert records[2]["text"] == expected_text("hi", 2)
    assert records[3]["error"]["param"] == "tools"


def test_a_stop_reason_is_in_the_record(run, tmp_path):
    ids = expected_tokens(encode("hi"), 3)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"stop_token_ids": [ids[1]]}, {"stop": [f"<{ids[2]}>"]}, {}]
    source.write_text("".join(json.dumps(line | {"prompt": "hi"}) + "\n" for line in lines))
    assert run(f"--input={source}", f"--output={output}", "--max_tokens=5") == 0
    by_id, by_text, by_length = read_records(output)
    assert (by_id["token_ids"], by_id["stop_reason"]) == (ids[:2], ids[1])
    assert by_id["text"] == decode(ids[:1]), "the token that ended it is no part of the text"
    assert (by_text["token_ids"], by_text["stop_reason"]) == (ids[:2], f"<{ids[2]}>")
    assert "stop_reason" not in by_length
