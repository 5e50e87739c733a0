"""Which names a server answers to: a page that makes its own name point to this machine learns nothing."""

import asyncio

import pytest

from jaxserve.server.app import make_app
from jaxserve.server.config import key_digest
from jaxserve.server.hosts import is_loopback, name_of
from tests.server.asgi import Answer, asgi_call
from tests.server.conftest import serving

KEY = "sk-test-key-0001"
OURS = [
    "localhost",
    "localhost:8000",
    "LOCALHOST.",
    "127.0.0.1:1",
    "127.9.9.9",
    "[::1]:80",
    "a.localhost",
]
OTHERS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "10.0.0.1",
    "",
    "127.0.0.1.evil",
    "::2",
]


def call(*hosts: str, path: str = "/v1/models", key: str = "", **settings) -> Answer:
    async def check():
        async with serving(**settings) as http:
            headers = [(b"host", host.encode()) for host in hosts]
            if key:
                headers.append((b"authorization", f"Bearer {key}".encode()))
            return await asgi_call(make_app(http.state), "GET", path, headers=headers)

    return asyncio.run(check())


@pytest.mark.parametrize("host", OURS)
def test_loopback_names_are_answered(host):
    assert call(host).status == 200


@pytest.mark.parametrize("host", OTHERS)
def test_other_names_are_refused_where_there_are_no_keys(host):
    answer = call(host)
    assert answer.status == 403
    assert answer.error["code"] == "host_not_allowed"
    assert answer.error["type"] == "permission_error"
    assert "--allowed_hosts" in answer.error["message"]
    assert call(host, path="/").status == 403, "the page too"
    assert call(host, path="/health").status == 200
    assert call(host, path="/nowhere").status == 403


def test_one_name_is_sent_or_none():
    assert call().status == 200
    assert call("localhost", "evil.example").status == 403


def test_names_that_are_allowed_are_answered_and_no_others():
    settings = {"allowed_hosts": ["Our.Example", "[2001:db8::1]"]}
    for host in ("our.example", "OUR.EXAMPLE:443", "[2001:DB8::1]:8000", "localhost"):
        assert call(host, **settings).status == 200, host
    assert call("evil.example", **settings).status == 403
    assert call("evil.example", allowed_hosts=["*"]).status == 200


def test_with_keys_or_another_address_any_name_is_answered_unless_some_are_named():
    keyed = {"api_key_digests": [key_digest(KEY)]}
    named = {"allowed_hosts": ["our.example"]}
    for settings, status in (
        ({"host": "0.0.0.0"}, 200),
        (keyed, 200),
        ({"host": "0.0.0.0"} | named, 403),
        (keyed | named, 403),
    ):
        assert call("evil.example", key=KEY, **settings).status == status, settings
    assert call("192.168.1.5", host="192.168.1.5", **named).status == 200, "its own address"


@pytest.mark.parametrize(
    ("host", "name"),
    [("A.b:1", "a.b"), ("a.b.", "a.b"), ("[::1]", "::1"), ("[::1]:9", "::1"), ("::1", "::1")],
)
def test_a_name_is_compared_without_its_port(host, name):
    assert name_of(host) == name


def test_what_is_loopback():
    assert all(is_loopback(name) for name in ("localhost", "127.0.0.1", "127.3.2.1", "::1"))
    assert not any(is_loopback(name) for name in ("0.0.0.0", "::", "notlocalhost", "127.1.example"))
