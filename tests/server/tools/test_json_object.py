"""JsonObject: takes exactly the beginnings of JSON objects, and says where their members stand."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.tools.json_object import MAX_DEPTH, JsonObject


def push_all(text: str) -> tuple[JsonObject, int]:
    """(the object, how many characters it took)."""
    one = JsonObject()
    for index, char in enumerate(text):
        if one.is_whole or not one.push(char):
            return one, index
    return one, len(text)


def is_json_object(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


ALPHABET = st.sampled_from(
    [*'{}[]":,\\ \n\t-+.eE019aufntrbls/', "true", "false", "null", '"a":', "\x00", "é"]
)


@settings(max_examples=1000, deadline=None)
@given(st.lists(ALPHABET, max_size=25))
def test_takes_what_json_takes(parts):
    text = "{" + "".join(parts)
    one, taken = push_all(text)
    assert one.is_whole == any(is_json_object(text[:end]) for end in range(len(text) + 1))
    if one.is_whole:
        assert is_json_object(text[:taken])


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=4),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(max_size=6),
            lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=3), one, max_size=3),
        ),
        max_size=4,
    ),
    st.booleans(),
    st.sampled_from([None, 0, 2]),
)  # fmt: skip
def test_says_where_the_members_stand(value, ensure_ascii, indent):
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
    one, taken = push_all(text + "}")
    assert (one.is_whole, taken) == (True, len(text))
    found = {
        json.loads(text[m.key_start : m.key_end]): json.loads(text[m.value_start : m.value_end])
        for m in one.members
    }
    assert found == value


def test_every_beginning_of_an_object_is_taken():
    text = '{"a": [-0, 1.5e+10, 20E-1, {"b": ["\\u00e9\\n", true, false, null, []]}, {}], "c": ""}'
    assert is_json_object(text)
    for end in range(len(text)):
        one, taken = push_all(text[:end])
        assert (one.is_whole, taken) == (False, end)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("[", 0),
        (" {", 0),
        ("{,", 1),
        ('{"\x1f', 2),
        ('{"a" 1', 5),
        ('{"a":01', 6),
        ('{"\\u12x', 6),
        ('{"a":1.}', 7),
        ('{"a":nul]', 8),
    ],
)
def test_stops_at_the_first_character_that_cannot_follow(text, taken):
    assert push_all(text)[1] == taken


def test_depth_is_bounded():
    inside = MAX_DEPTH - 1
    assert push_all('{"a":' + "[" * inside)[1] == 5 + inside
    assert push_all('{"a":' + "[" * (inside + 1))[1] == 5 + inside
