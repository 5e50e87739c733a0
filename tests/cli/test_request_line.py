"""What a line means, and what a line that means nothing gets."""

import json
import logging

import pytest

from jaxserve.cli.request_line import LineParser
from jaxserve.request import SamplingParams
from jaxserve.seeds import derive_seed


def parse(*lines: str | bytes | dict, **options):
    parser = LineParser(options.pop("sampling", {}), seed=0, **options)
    data = [json.dumps(x).encode() if isinstance(x, dict) else x for x in lines]
    return [parser.parse(i, x.encode() if isinstance(x, str) else x) for i, x in enumerate(data)]


def parse_one(line, **options):
    return parse(line, **options)[0]


def test_fields_reach_the_request():
    line = parse_one(
        {
            "id": "a",
            "prompt": "hello",
            "max_tokens": 3,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "stop": ["x"],
            "seed": 11,
            "ignore_eos": True,
            "logprobs": 1,
            "n": 2,
            "priority": -3,
            "cache_salt": "s",
        }
    )
    assert (line.index, line.id, line.prompt, line.error) == (0, "a", "hello", None)
    assert (line.priority, line.cache_salt) == (-3, "s")
    assert line.params == SamplingParams(
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        stop=["x"],
        seed=11,
        ignore_eos=True,
        logprobs=1,
        n=2,
    )


def test_a_lines_own_field_beats_the_flag_and_null_is_not_set():
    sampling = {"temperature": 0.3, "max_tokens": 9, "stop": ["a"]}
    lines = parse(
        {"prompt": "x", "temperature": 0}, {"prompt": "x", "temperature": None}, sampling=sampling
    )
    assert [line.params.temperature for line in lines] == [0, 0.3]
    assert all(line.params.max_tokens == 9 and line.params.stop == ("a",) for line in lines)


def test_seeds_of_lines_without_one_depend_on_seed_and_index_alone():
    lines = parse({"prompt": "x"}, {"prompt": "x", "seed": 5}, {"prompt": "x"})
    assert [line.params.seed for line in lines] == [derive_seed(0, 0), 5, derive_seed(0, 2)]


def test_prompt_kinds():
    assert parse_one({"prompt": [1, 2]}).prompt == [1, 2]
    assert parse_one({"prompt": "two words", "prompt_token_ids": [1, 2]}).prompt == [1, 2]
    messages = [{"role": "user", "content": "hi"}]
    assert parse_one({"messages": messages}).messages == messages
    assert parse_one("a-b  c", is_text=True).prompt == "a-b  c"
    assert parse_one("hi", is_text=True, is_chat=True).messages == messages
    assert parse_one('{"prompt": 1}', is_text=True).prompt == '{"prompt": 1}'


BAD_LINES = [
    ("", "blank", "prompt", "blank_line"),
    (" \t", "blank", "prompt", "blank_line"),
    ("[1,2]", "must be a JSON object, got an array", None, "not_an_object"),
    ("null", "got null", None, "not_an_object"),
    ('"x"', "got a string", None, "not_an_object"),
    ("3", "got a number", None, "not_an_object"),
    ("true", "got a boolean", None, "not_an_object"),
    ("{broken", "not valid JSON", None, "invalid_json"),
    ('{"prompt": "a', "Unterminated string starting at character 12", None, "invalid_json"),
    ('{"prompt": "\t"}', "Invalid control character at character 13", None, "invalid_json"),
    ('{"prompt": 1 2}', "Expecting ',' delimiter at character 14", None, "invalid_json"),
    ('{"prompt": "a"} x', "not valid JSON", None, "invalid_json"),
    ("[" * 200_000, "nested too deeply", None, "invalid_json"),
    ('{"prompt": ' + "9" * 5000 + "}", "not valid JSON", None, "invalid_json"),
    (b'{"prompt": "\xff"}', "not UTF-8: invalid start byte at byte 12", None, "invalid_utf8"),
    ({}, "a prompt or messages is needed", "prompt", None),
    ({"prompt": None}, "a prompt or messages is needed", "prompt", None),
    ({"prompt": 5}, "prompt must be text or a list of token ids, got a number", "prompt", None),
    ({"prompt": ["a"]}, 'prompt[0] must be a token id (an integer), got "a"', "prompt", None),
    ({"prompt": [1, True]}, "prompt[1] must be a token id (an integer), got true", "prompt", None),
    ({"prompt": [1, 2.5]}, "prompt[1] must be a token id (an integer), got 2.5", "prompt", None),
    ({"prompt": [1.0]}, "prompt[0] must be a token id (an integer), got 1.0", "prompt", None),
    ('{"prompt": [3, NaN]}', "prompt[1] must be a token id (an integer), got NaN", "prompt", None),
    ({"prompt": ["x" * 999]}, 'got "' + "x" * 99 + "...", "prompt", None),
    ({"prompt_token_ids": [None]}, "prompt_token_ids[0] must be", "prompt_token_ids", None),
    ({"prompt": [[1]]}, "prompt[0] must be a token id (an integer), got [1]", "prompt", None),
    ({"prompt_token_ids": "a"}, "prompt_token_ids must be a list", "prompt_token_ids", None),
    ({"prompt": "a", "messages": [{}]}, "exclude each other", "messages", None),
    ({"messages": []}, "got an empty array", "messages", None),
    ({"messages": "a"}, "got a string", "messages", None),
    ({"messages": ["a"]}, "messages[0] must be an object", "messages", None),
    ({"messages": [{"content": "a"}]}, "messages[0].role must be a string", "messages", None),
    ('{"prompt": "\\ud800"}', "half of a surrogate pair", "prompt", None),
    ('{"messages": [{"role": "user", "content": "\\udfff"}]}', "surrogate", "messages", None),
    ({"prompt": "a", "id": [1]}, "id must be a string or an integer, got an array", "id", None),
    ({"prompt": "a", "id": True}, "got a boolean", "id", None),
    ('{"prompt": "a", "temperature": NaN}', "temperature", "temperature", None),
    ({"prompt": "a", "temperature": "hot"}, "temperature", "temperature", None),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens", "max_tokens", None),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "max_tokens", None),
    ('{"prompt": "a", "top_p": 1' + "0" * 400 + "}", "an integer of 1329 bits", "top_p", None),
    ({"prompt": "a", "stop": 3}, "stop", "stop", None),
    ({"prompt": "a", "top_p": 2}, "top_p", "top_p", None),
    ({"prompt": "a", "ignore_eos": "yes"}, "ignore_eos", "ignore_eos", None),
]


@pytest.mark.parametrize(("data", "message", "param", "code"), BAD_LINES)
def test_bad_lines_are_named(data, message, param, code):
    line = parse_one(data)
    assert line.error is not None
    assert message in line.error.message
    assert (line.error.param, line.error.code) == (param, code)


@pytest.mark.parametrize(
    ("data", "message"), [("", "the prompt is empty"), (b"\xff", "the prompt is not UTF-8")]
)
def test_a_bad_prompt_is_called_a_prompt(data, message):
    assert parse_one(data, is_text=True).error.message.startswith(message)


def test_a_bad_line_keeps_its_id():
    assert parse_one({"id": "a", "prompt": 5}).id == "a"
    assert parse_one({"id": 7, "top_p": 9, "prompt": "a"}).id == 7


def test_the_second_use_of_an_id_is_refused_and_says_where_the_first_was():
    lines = parse(
        {"id": "a", "prompt": "x"},
        {"prompt": "x"},
        {"prompt": "x"},
        {"id": "a", "prompt": "x"},
        {"id": 1, "prompt": "x"},
        {"id": "1", "prompt": "x"},
    )
    assert [line.error is None for line in lines] == [True, True, True, False, True, True]
    assert lines[3].id == "a"
    assert "line 1" in lines[3].error.message
    assert (lines[3].error.param, lines[3].error.code) == ("id", "duplicate_id")


def test_unknown_fields_warn_once_and_are_ignored(caplog):
    with caplog.at_level(logging.WARNING, "jaxserve"):
        lines = parse(
            {"prompt": "a"}, {"prompt": "a", "stream": True}, {"prompt": "a", "stream": 1, "top": 2}
        )
    assert all(line.error is None for line in lines)
    assert [record.getMessage() for record in caplog.records] == [
        "line 2: unknown field 'stream' is ignored; said once for all lines",
        "line 3: unknown field 'top' is ignored (did you mean 'stop'?); said once for all lines",
    ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cache_slat", " (did you mean 'cache_salt'?)"),
        ("Cache-Salt", " (did you mean 'cache_salt'?)"),
        (
            "beam_width",
            " (a line is not decoded by beam search: LLM.beam_search does that, in Python)",
        ),
        (
            "best_of",
            " (a line is not decoded by beam search: LLM.beam_search does that, in Python)",
        ),
        ("use_beam_search", " (a line is not decoded by beam search: LLM.beam_search does"),
        ("length_penalty", " (a line is not decoded by beam search: LLM.beam_search does"),
        ("user", "; said once"),
    ],
)
def test_an_unknown_field_gets_a_hint(caplog, name, hint):
    with caplog.at_level(logging.WARNING, "jaxserve"):
        (line,) = parse({"prompt": "a", name: 1})
    assert line.error is None
    (record,) = caplog.records
    assert f"unknown field {name!r} is ignored{hint}" in record.getMessage()
