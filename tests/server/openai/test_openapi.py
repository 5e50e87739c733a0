import asyncio

import jsonschema
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.server.app import all_routes
from jaxserve.server.config import key_digest
from jaxserve.server.openai import chat, completions
from jaxserve.server.openai.endpoint import what_is_served
from jaxserve.server.openai.fields import UnknownFields
from jaxserve.server.openai.openapi import URL, document
from tests.server.conftest import serving
from tests.server.fake_client import FakeEngineClient

MESSAGES = [{"role": "user", "content": "hi"}]
ENDPOINTS = {
    completions.URL: (completions, "CompletionBody", {"prompt": "hi"}),
    chat.URL: (chat, "ChatBody", {"messages": MESSAGES}),
}
EACH = pytest.mark.parametrize("url", ENDPOINTS)


def _validator(name):
    described = document(vocab_size=512, has_keys=False)
    root = {"$ref": f"#/components/schemas/{name}", "components": described["components"]}
    return jsonschema.Draft202012Validator(root)


def _run(check, script=None, **settings):
    async def main():
        async with serving(FakeEngineClient(script), **settings) as http:
            await check(http)

    asyncio.run(main())


def test_the_document_stands_and_its_schemas_are_schemas():
    async def check(http):
        reply = await http.get(URL)
        assert reply.status_code == 200
        described = reply.json()
        assert described["openapi"] == "3.1.0"
        for schema in described["components"]["schemas"].values():
            jsonschema.Draft202012Validator.check_schema(schema)
        names = set(described["components"]["schemas"])
        assert all(ref.rpartition("/")[2] in names for ref in _refs(described))
        assert "security" not in described

    _run(check)


def _refs(value):
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for one in value.values():
            yield from _refs(one)
    elif isinstance(value, list):
        for one in value:
            yield from _refs(one)


def test_keys_are_told_of():
    async def check(http):
        headers = {"Authorization": "Bearer secret-key"}
        assert (await http.get(URL)).status_code == 401
        described = (await http.get(URL, headers=headers)).json()
        assert described["security"] == [{"key": []}]

    _run(check, api_key_digests=(key_digest("secret-key"),))


def test_every_route_of_the_server_is_described():
    async def check(http):
        paths = (await http.get(URL)).json()["paths"]
        for route in all_routes(http.state):
            path = route.path.replace(":path", "")
            is_api = path.startswith("/v1") or path in ("/tokenize", "/detokenize", "/health")
            assert not is_api or path in paths

    _run(check)


@EACH
@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"n": 2, "max_tokens": 1}])
def test_replies_are_as_described(url, more):
    _, _, body = ENDPOINTS[url]
    more = more | ({"logprobs": True, "top_logprobs": 2} if "logprobs" in more else {})
    if url == completions.URL:
        more.pop("top_logprobs", None)
        more |= {"logprobs": 2, "echo": True} if "logprobs" in more else {}

    async def check(http):
        reply = await http.post(url, json=body | more)
        name = "Completion" if url == completions.URL else "ChatCompletion"
        _validator(name).validate(reply.json())
        failed = await http.post(url, json={})
        _validator("Error").validate(failed.json())
        _validator("Models").validate((await http.get("/v1/models")).json())
        _validator("Tokens").validate((await http.post("/tokenize", json={"prompt": "a"})).json())

    _run(check, "hello")


@EACH
def test_ranges_are_those_that_are_held(url):
    """At each limit a value is taken, and one behind it neither taken nor described as right."""
    module, name, body = ENDPOINTS[url]
    validator = _validator(name)

    async def check(http):
        served = what_is_served(http.state, UnknownFields())
        num_checked = 0
        for field in module.FIELDS.values():
            more = {"logprobs": True} if field.name == "top_logprobs" else {}
            for limit, beyond in (("minimum", -1), ("maximum", 1)):
                if limit not in field.schema:
                    continue
                value = field.schema[limit]
                if field.name == "min_tokens":
                    more = {"max_tokens": 5}
                module.parse(body | more | {field.name: value}, served).requests([[1]], None)
                validator.validate(body | {field.name: value})
                wrong = body | more | {field.name: value + beyond}
                with pytest.raises(InvalidRequestError):
                    module.parse(wrong, served).requests([[1]], None)
                assert not validator.is_valid(wrong)
                num_checked += 1
        assert num_checked > 20

    _run(check)


@EACH
def test_wrong_types_are_neither_described_nor_taken(url):
    module, name, body = ENDPOINTS[url]
    validator = _validator(name)

    async def check(http):
        served = what_is_served(http.state, UnknownFields())
        for field in module.FIELDS.values():
            if field.use == "ignored":
                continue
            for value in ("text", 1.5, True, ["x", 1], {"no": 1}, [[]], ""):
                wrong = body | {field.name: value}
                if validator.is_valid(wrong):
                    continue
                with pytest.raises(InvalidRequestError):
                    module.parse(wrong, served).encode()

    _run(check)
