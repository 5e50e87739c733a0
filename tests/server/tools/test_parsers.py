"""Tool parsers: what is a call and what is content, whatever the cuts; C39."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import ConfigError
from jaxserve.server.tools.parser import PARSERS, detect_parser, make_parser, new_call_id
from tests.server.tools.parsing import Reply, cuts, read

NESTED = '{"list": [{"a": [1, -2.5e3, {}]}, [], null], "on": true}'
QUOTES = '{"text": "she said \\"{[<tool_call>\\" \\\\ </tool_call> }]", "b": "\\\\"}'
UNICODE = '{"place": "Zürich 🙂 \\u00e9 \\ud83d\\ude42", "名": "ZX"}'


def hermes(arguments: str, name: str = "f") -> str:
    return f'<tool_call>{{"name":"{name}","arguments":{arguments}}}</tool_call>'


def llama(arguments: str, name: str = "f") -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


# text -> (content, calls)
HERMES = {
    "no arguments": (hermes("{}"), "", [("f", "{}")]),
    "nested": (hermes(NESTED), "", [("f", NESTED)]),
    "quotes and marks in strings": (hermes(QUOTES), "", [("f", QUOTES)]),
    "unicode": (hermes(UNICODE), "", [("f", UNICODE)]),
    "prose before": ("Let me <see>. " + hermes("{}"), "Let me <see>. ", [("f", "{}")]),
    "two calls": (
        hermes("{}") + "\n" + hermes('{"a":1}', "g") + "\n",
        "",
        [("f", "{}"), ("g", '{"a":1}')],
    ),
    "unterminated": (hermes(NESTED)[:-30], hermes(NESTED)[:-30], []),
    "only the closing mark is missing": (hermes(NESTED)[:-12], "", [("f", NESTED)]),
    "half of the closing mark is missing": (hermes(NESTED)[:-6], "", [("f", NESTED)]),
    "blanks everywhere": (
        ' \n<tool_call> \n{ "name" : "f" , "arguments" : { } } \n</tool_call> ',
        "",
        [("f", "{ }")],
    ),
    "arguments before the name, and more": (
        '<tool_call>{"arguments": {"a": 1}, "id": 7, "type": "function", "name": "f"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    "a name alone": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "null for arguments": (hermes("null"), "", [("f", "{}")]),
    "parameters for arguments": (
        '<tool_call>{"name": "f", "parameters": {}}</tool_call>',
        "",
        [("f", "{}")],
    ),
    "a list of calls": (
        'On it. <tool_call>[{"name":"f","arguments":{}}, {"name":"g","arguments":{}}]</tool_call>',
        "On it. ",
        [("f", "{}"), ("g", "{}")],
    ),
    "text between and behind": (
        "a" + hermes("{}") + " b " + hermes("{}") + "\nc",
        "a b \nc",
        [("f", "{}"), ("f", "{}")],
    ),
    "a mark in the middle of another": (
        "<tool_<tool_call<tool_call>" + hermes("{}")[11:],
        "<tool_<tool_call",
        [("f", "{}")],
    ),
    "a name with escapes": (
        '<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>',
        "",
        [("f", "{}")],
    ),
    "text after the object": (
        '<tool_call>{"name": "f", "arguments": {}} and so on',
        " and so on",
        [("f", "{}")],
    ),
    "broken, then right": (
        '<tool_call>{"name": f}</tool_call>' + hermes("{}"),
        '<tool_call>{"name": f}</tool_call>',
        [("f", "{}")],
    ),
    "the next mark where the object breaks off": (
        '<tool_call>{"name": "f", ' + hermes("{}"),
        '<tool_call>{"name": "f", ',
        [("f", "{}")],
    ),
    "blanks alone": (" \n ", " \n ", []),
    "nothing": ("", "", []),
    "a mark alone": ("<tool_call>", "<tool_call>", []),
    "half a mark": ("so <tool_", "so <tool_", []),
}
NO_HERMES_CALLS = (
    "<tool_call>{}</tool_call>",
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>',
    f'<tool_call>{{"name": "{"f" * 300}", "arguments": {{}}}}</tool_call>',
    hermes("[]"),
    hermes('"{}"'),
    hermes("{a: 1}"),
    hermes("{'a': 1}"),
    hermes('{"a": NaN}'),
    hermes('{"a": 01}'),
    hermes('{"a": 1.}'),
    hermes('{"a": +1}'),
    hermes('{"a": tru}'),
    hermes('{"a": 1,}'),
    hermes('{"a": [1,]}'),
    hermes('{"a": "\n"}'),
    hermes('{"a": "\\x"}'),
    hermes('{"a": "\\u12g4"}'),
    hermes('{"a": ' + "[" * 200 + "]" * 200 + "}"),
    "<tool_call>f(a=1)</tool_call>",
    "<tool_call>[[]]</tool_call>",
)
LLAMA = {
    "no arguments": (llama("{}"), "", [("f", "{}")]),
    "nested": (llama(NESTED), "", [("f", NESTED)]),
    "quotes and marks in strings": (llama(QUOTES), "", [("f", QUOTES)]),
    "unicode": (llama(UNICODE), "", [("f", UNICODE)]),
    "prose before": ("Sure; {x}:\n" + llama("{}"), "Sure; {x}:\n", [("f", "{}")]),
    "several": (
        f"{llama('{}')}; {llama('{}', 'g')};\n{llama('{}', 'h')} ;",
        "",
        [("f", "{}"), ("g", "{}"), ("h", "{}")],
    ),
    "unterminated": (llama(NESTED)[:-5], llama(NESTED)[:-5], []),
    "a tag": ("<|python_tag|>" + llama("{}"), "", [("f", "{}")]),
    "a tag behind prose": ("Well <|python_tag|> " + llama("{}"), "Well ", [("f", "{}")]),
    "a tag and a name": ('<|python_tag|>{"name": "f"}', "", [("f", "{}")]),
    "a tag for each": (
        f"<|python_tag|>{llama('{}')};<|python_tag|>{llama('{}', 'g')}",
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    "arguments, and a type": (
        '{"type": "function", "name": "f", "arguments": {"a": 1}}',
        "",
        [("f", '{"a": 1}')],
    ),
    "text behind": (llama("{}") + "\nDone; yes.", "\nDone; yes.", [("f", "{}")]),
    "a semicolon in text": (f"{llama('{}')};x{llama('{}')}", f";x{llama('{}')}", [("f", "{}")]),
}
NO_LLAMA_CALLS = (
    '{"name": "Bob", "age": 3}',
    '{"name": "Bob"}',
    '{"answer": {"name": "f", "parameters": {}}}',
    '{"parameters": {}}',
    "see " + llama("{}"),
    "a {" + llama("{}"),
    "<|python_tag|>brave_search.call(query='x')",
    "<|python_tag|>",
    "<|python_" + llama("{}"),
    "; ",
    "{",
    '{"name": "f", "parameters": {"a": 1]}',
)


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("case", HERMES)
def test_hermes(case, live):
    check("hermes", *HERMES[case], live=live and case != "unterminated")


@pytest.mark.parametrize("text", NO_HERMES_CALLS)
def test_hermes_without_a_call(text):
    check("hermes", text, text, [])


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("case", LLAMA)
def test_llama3_json(case, live):
    check("llama3_json", *LLAMA[case], live=live and case != "unterminated")


@pytest.mark.parametrize("text", NO_LLAMA_CALLS)
def test_llama3_json_without_a_call(text):
    check("llama3_json", text, text, [])


def check(parser: str, text: str, content: str, calls: list, live: bool = False) -> None:
    for pieces in cuts(text):
        reply = read(parser, pieces, live=live)
        assert (reply.content, reply.calls) == (content, calls), pieces
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("parser", "text"), [("hermes", hermes(QUOTES)), ("llama3_json", llama(QUOTES))]
)
def test_live_arguments_come_as_they_are_written(parser, text):
    one_by_one = read(parser, list(text), live=True)
    assert one_by_one.num_argument_deltas == len(QUOTES)
    assert one_by_one.calls == [("f", QUOTES)]
    assert read(parser, list(text)).num_argument_deltas == 1


@pytest.mark.parametrize(
    ("parser", "text"), [("hermes", hermes(NESTED)), ("llama3_json", llama(NESTED))]
)
def test_a_live_call_that_was_cut_off_stays_a_call_wherever_it_was_cut(parser, text):
    begins = text.index(NESTED)
    for length in range(len(text)):
        replies = [read(parser, pieces, live=True) for pieces in cuts(text[:length])]
        is_call = length > begins
        arguments = NESTED[: max(0, length - begins)]
        assert all(r.calls == ([("f", arguments)] if is_call else []) for r in replies)
        assert all(r.content == ("" if is_call else text[:length]) for r in replies)


def test_calls_beyond_the_limit_are_left_out():
    text = "a" + hermes("{}") + "\n" + hermes("{}", "g") + "b"
    for live in (False, True):
        for pieces in cuts(text):
            reply = read("hermes", pieces, max_calls=1, live=live)
            assert (reply.content, reply.calls) == ("ab", [("f", "{}")])


@pytest.mark.parametrize("parser", PARSERS)
def test_text_is_not_held_back_longer_than_needed(parser):
    one = make_parser(parser)
    held = {"hermes": "<tool_ca", "llama3_json": "<|python"}[parser]
    assert [d.text for d in one.feed(f"Hello {held}")] == ["Hello "]
    assert [d.text for d in one.feed("x there ")] == [f"{held}x there "]
    assert one.finish() == []


PIECES = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<|python_tag|>", '{"name":"f",', '"arguments":', '"parameters":',
         "{", "}", "[", "]", ",", ";", '"', "\\", "\n", " ", "x", "<", "1", "-", "null", "é", "<tool_"]
    ),
    max_size=30,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(parser=st.sampled_from(PARSERS), live=st.booleans(), parts=PIECES, seed=st.integers(0, 99))
def test_any_text_is_read_the_same_in_any_pieces(parser, live, parts, seed):
    text = "".join(parts)
    whole = read(parser, [text], live=live)
    for pieces in [list(text), parts, list(cuts(text))[5 + seed % 20]]:
        reply = read(parser, pieces, live=live)
        assert (reply.content, reply.calls) == (whole.content, whole.calls)
    if not live:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole.calls)
        if not whole.calls:
            assert whole.content == text


@settings(max_examples=200, deadline=None)
@given(
    value=st.dictionaries(
        st.text(max_size=4),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(max_size=6),
            lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=3), one, max_size=3),
            max_leaves=8,
        ),
        max_size=3,
    ),
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 1]),
)  # fmt: skip
def test_whatever_json_writes_is_read(value, ensure_ascii, indent):
    arguments = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
    expected = Reply("", [("f", arguments)])
    for parser, text in (("hermes", hermes(arguments)), ("llama3_json", llama(arguments))):
        reply = read(parser, [text])
        assert (reply.content, reply.calls) == (expected.content, expected.calls)


HOSTILE = {
    "marks": "<tool_call>" * 9,
    "tags": "<|python_tag|>" * 7,
    "open objects": '{"name":' * 12,
    "open calls": '<tool_call>{"name":"f","arguments":{"a":' * 3,
    "open calls on lines": '\n{"name":"f","parameters":{"a":' * 3,
    "backslashes": '<tool_call>{"name":"f","arguments":{"a":"' + "\\\\" * 30,
    "blanks": " \n" * 50,
    "semicolons": llama("{}") + ";" * 60,
    "closing marks": hermes("{}") + "</tool_call" * 8,
    "lists": "<tool_call>[" * 8 + "{" * 10,
}


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("shape", HOSTILE)
def test_time_grows_with_the_length_alone(parser, shape):
    """Twenty times the text in at most sixty times the time: a square would be four hundred."""
    pattern = HOSTILE[shape]

    def cost(size: int) -> float:
        text = (pattern * (size // len(pattern) + 1))[:size]
        one = make_parser(parser)
        begin = time.process_time()
        for start in range(0, size, 4):
            one.feed(text[start : start + 4])
        one.finish()
        return time.process_time() - begin

    small, large = min(cost(5_000) for _ in range(3)), cost(100_000)
    assert large < 60 * max(small, 0.002)


def test_every_id_is_another():
    ids = {new_call_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(one.startswith("call_") for one in ids)


def test_an_unknown_parser_is_refused_by_name():
    with pytest.raises(
        ConfigError, match="tool_call_parser must be one of hermes, llama3_json, got 'x'"
    ):
        make_parser("x")


QWEN = (
    '{%- if tools %}# Tools ... <tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": '
    "<args-json-object>}\\n</tool_call>{%- endif %}"
)
LLAMA_3 = (
    '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name and '
    'its value}.\' }}{{- "<|python_tag|>" }}'
)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (QWEN, "hermes"),
        (LLAMA_3, "llama3_json"),
        (LLAMA_3.replace("<|python_tag|>", ""), "llama3_json"),
        ("<tool_call>\n<function=f>\n<parameter=a>\n arguments", None),
        ("<tool_call>{name}\n<arg_key>arguments</arg_key>", None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("", None),
        (None, None),
    ],
)
def test_the_format_is_told_by_the_template(template, name):
    assert detect_parser(template) == name
