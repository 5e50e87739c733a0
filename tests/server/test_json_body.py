"""Bodies: what is JSON, an object, shallow enough; every other one is a 400 with a reason."""

import asyncio
import json

import pytest

from jaxserve.server.config import MAX_JSON_CONTAINERS, MAX_JSON_DEPTH, MAX_JSON_MEMBERS
from jaxserve.server.errors import ApiError
from jaxserve.server.json_body import parse_object
from tests.server.conftest import serving


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "valid JSON"),
        (b"   ", "valid JSON"),
        (b"{", "valid JSON"),
        (b'{"a":1}{}', "trailing"),
        (b"{'a':1}", "valid JSON"),
        (b'{"a":NaN}', "valid JSON"),
        (b'{"a":Infinity}', "valid JSON"),
        (b'{"a":1e999}', "out of range"),
        (b'{"a":' + b"9" * 5000 + b"}", "out of range"),
        (b'{"a":"\xff"}', "valid JSON"),
        (b'{"a":"\xed\xa0\x80"}', "valid JSON"),
        (b'{"a":"\\ud800"}', "surrogate"),
        (b'{"a":"x\\udc00y"}', "surrogate"),
        (b'{"\\ud800":1}', "surrogate"),
        (b"\xef\xbb\xbf{}", "valid JSON"),
        (b"[]", "an array"),
        (b'"text"', "a string"),
        (b"null", "null"),
        (b"true", "a boolean"),
        (b"12", "a number"),
        (nested(MAX_JSON_DEPTH + 1), f"at most {MAX_JSON_DEPTH} deep"),
        (b"[" * 1_000_000, "deep"),
        (b'{"a":' * 100_000, "deep"),
    ],
)
def test_what_is_no_object_is_a_400(body, words):
    with pytest.raises(ApiError, match=words) as caught:
        parse_object(body)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": "[[[" * 100 + '"' + "\\" * 3 + "{" * 100},
        {"a": "😀 \ud7ff é", "b": [1, 2.5, None, True, {"c": []}]},
        {"a": list(range(100_000))},
        {"a": "\\"},
    ],
)
def test_an_object_is_what_it_says(value):
    assert parse_object(json.dumps(value).encode()) == value
    assert parse_object(json.dumps(value, ensure_ascii=False).encode()) == value


def test_brackets_in_strings_are_not_nesting():
    assert parse_object(b'{"a":"' + b"[" * 1000 + b'"}')
    assert parse_object(nested(MAX_JSON_DEPTH))


def test_a_string_that_never_ends_is_looked_at_once():
    """Looked at again from each of its quotes, this would take hours."""
    for end in (b"", b"\\", b'"', b"\\\\"):
        body = b"{" * 65 + b'"a":"' + b'\\"' * 1_000_000 + end
        with pytest.raises(ApiError, match="deep"):
            parse_object(body)
        with pytest.raises(ApiError, match="valid JSON"):
            parse_object(b'{"a":[' + b"[]," * 64 + b'"' + b'\\"' * 1_000_000 + end)


def test_where_a_long_string_ends_is_known():
    text = '\\\\"[\\"' * 100_000
    body = json.dumps({"a": text, "b": [[1]] * 70}).encode()
    assert parse_object(body) == {"a": text, "b": [[1]] * 70}


def test_objects_and_arrays_are_counted():
    most = b"[" + b",".join([b"{}"] * (MAX_JSON_CONTAINERS - 2)) + b"]"
    assert len(parse_object(b'{"a":' + most + b"}")["a"]) == MAX_JSON_CONTAINERS - 2
    with pytest.raises(
        ApiError, match=f"at most {MAX_JSON_CONTAINERS} objects and arrays"
    ) as caught:
        parse_object(b'{"a":[' + most + b"]}")
    assert caught.value.code == "json_too_large"


def test_members_are_counted():
    members = [b'"%d":0' % number for number in range(MAX_JSON_MEMBERS)]
    assert len(parse_object(b"{" + b",".join(members) + b"}")) == MAX_JSON_MEMBERS
    assert parse_object(b'{"a":"' + b":" * (MAX_JSON_MEMBERS + 1) + b'"}')
    with pytest.raises(ApiError, match=f"at most {MAX_JSON_MEMBERS} members"):
        parse_object(b"{" + b",".join(members) + b',"a":0}')


def test_a_pair_of_surrogates_is_one_character():
    assert parse_object(b'{"a":"\\ud83d\\ude00"}') == {"a": "😀"}


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 400),  # read, and found without a prompt
        ("Application/JSON; charset=utf-8", 400),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
        ("application/json2", 415),
        ("text/plain, application/json", 415),
    ],
)
def test_the_content_type_is_json(kind, status):
    """So that a page of another origin cannot post without asking first (CORS)."""

    async def check():
        async with serving() as http:
            headers = {"content-type": kind} if kind else {}
            reply = await http.post("/v1/completions", content=b'{"n": 1}', headers=headers)
            assert reply.status_code == status
            assert reply.json()["error"]["type"] == "invalid_request_error"

    asyncio.run(check())


def test_a_compressed_body_is_not_unpacked():
    async def check():
        async with serving() as http:
            headers = {"content-type": "application/json", "content-encoding": "gzip"}
            reply = await http.post("/v1/completions", content=b"\x1f\x8b", headers=headers)
            assert reply.status_code == 415

    asyncio.run(check())
