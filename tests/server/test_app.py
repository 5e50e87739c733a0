"""What every reply has, whatever was asked: OpenAI's error object, sane methods; CORS where wanted."""

import asyncio
import logging

import pytest
from starlette.routing import Route

from jaxserve.errors import EngineDeadError
from jaxserve.server import app as app_module
from jaxserve.server.app import make_app
from tests.server.asgi import asgi_call
from tests.server.conftest import serving

FIELDS = {"message", "type", "param", "code"}


def ask(method: str, url: str, settings: dict | None = None, **options):
    async def call():
        async with serving(**settings or {}) as http:
            return await http.request(method, url, **options)

    return asyncio.run(call())


@pytest.mark.parametrize(
    ("method", "url", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/health/", 404),
        ("GET", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("PROPFIND", "/version", 405),
        ("GET", "/v1/models/%F0%9F%98%80", 404),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404),
    ],
)
def test_what_is_not_there_is_told_in_openais_shape(method, url, status):
    reply = ask(method, url)
    assert reply.status_code == status
    assert reply.json()["error"].keys() == FIELDS
    assert reply.json()["error"]["message"]
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    if status == 405:
        assert reply.headers["allow"]


def test_head_is_get_without_a_body():
    for url in ("/health", "/v1/models", "/version"):
        assert ask("HEAD", url).status_code == 200


def test_the_clients_id_comes_back_if_it_is_harmless():
    for given in ("abc-123", "00-4bf92f3577b34da6a3ce929d0e0e4736-00", "a" * 128, "a/b:c@d=e+f"):
        assert (
            ask("GET", "/health", headers={"X-Request-Id": given}).headers["x-request-id"] == given
        )
    made = set()
    for given in ("", "a b", "a" * 129, "a\tb", 'a"b', "a,b", b"\xe9", "a\\n"):
        reply = ask("GET", "/health", headers={"X-Request-Id": given})
        made.add(reply.headers["x-request-id"])
    assert len(made) == 8
    assert all(len(one) == 32 and one.isalnum() for one in made)


def test_the_log_has_ids_and_no_prompt(caplog):
    caplog.set_level(logging.DEBUG, "jaxserve")
    body = {"prompt": "a secret prompt", "max_tokens": 1, "unknown_field": "another secret"}
    ask("POST", "/v1/completions", json=body, headers={"X-Request-Id": "id-1"})
    ask(
        "POST",
        "/v1/completions",
        json={"prompt": ["a secret", 5]},
        headers={"X-Request-Id": "id-2"},
    )
    ask("GET", "/no%0Asuch%1bthing" + "x" * 500)
    text = caplog.text
    assert "POST /v1/completions 200 in" in text
    assert "request id-1" in text
    assert "POST /v1/completions 400 in" in text
    assert "secret" not in text
    assert "/no\\nsuch\\x1bthing" in text
    assert max(map(len, text.splitlines())) < 400
    levels = {r.levelname for r in caplog.records if "GET /health" in r.message}
    assert levels <= {"DEBUG"}


def failing(error: Exception):
    async def fail(request):
        raise error

    return Route("/fail", fail)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ValueError("/etc/secret at 0x7f0000"), 500, "failed to answer"),
        (RuntimeError("boom"), 500, "failed to answer"),
        (EngineDeadError("/tmp/pipe is gone"), 503, "engine"),
        (RecursionError(), 500, "failed to answer"),
    ],
)
def test_what_nobody_expected_is_logged_and_told_without_details(
    error, status, words, monkeypatch, caplog
):
    async def check():
        async with serving() as http:
            monkeypatch.setattr(app_module, "all_routes", lambda state: [failing(error)])
            answer = await asgi_call(make_app(http.state), "GET", "/fail")
            assert answer.status == status
            assert words in answer.error["message"]
            assert "/etc" not in answer.body.decode()
            assert "/tmp" not in answer.body.decode()
            assert answer.headers["x-request-id"]
            if status == 500:
                assert answer.headers["x-request-id"] in caplog.text
                assert type(error).__name__ in caplog.text

    asyncio.run(check())


def test_cors_is_off_unless_an_origin_is_named():
    asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    assert ask("OPTIONS", "/v1/completions", headers=asked).status_code == 405
    plain = ask("GET", "/version", headers={"Origin": "https://example.org"})
    assert not any(name.startswith("access-control") for name in plain.headers)
    allowed = {"cors_allow_origins": ["https://example.org"]}
    reply = ask("OPTIONS", "/v1/completions", allowed, headers=asked)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://example.org"
    error = ask("GET", "/nowhere", allowed, headers=asked)
    assert error.status_code == 404
    assert error.headers["access-control-allow-origin"] == "https://example.org"
    other = ask("GET", "/version", allowed, headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-credentials" not in reply.headers


def test_version_and_load():
    async def check():
        async with serving() as http:
            version = (await http.get("/version")).json()
            assert version == {"version": "0.1.0"}
            assert (await http.get("/load")).json() == {"server_load": 0}
            assert (await http.get("/health")).content == b""
            assert (await http.get("/ping")).status_code == 200
            assert (await http.post("/ping")).status_code == 200

    asyncio.run(check())
