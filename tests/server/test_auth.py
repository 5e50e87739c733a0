"""API keys: every route, with and without one, under odd hosts and odd spellings of paths."""

import asyncio
import base64
import itertools
import urllib.parse

import pytest
from starlette.routing import Route

from jaxserve.server.app import all_routes, make_app
from jaxserve.server.auth import OPEN_PATHS
from jaxserve.server.config import ServerConfig, key_digest
from jaxserve.server.state import ServerState
from tests.server.asgi import asgi_call
from tests.server.conftest import serving
from tests.server.fake_client import FakeEngineClient

KEY, OTHER = "sk-right-0123456789", "sk-other-0123456789"
HOSTS = ["test", "localhost/health", "x/health?", "health:80", "a b", ""]


def spellings(path: str) -> list[str]:
    """Ways of writing a path that a careless check might take for an open one."""
    return [
        path,
        "/" + path,
        path + "/",
        path.upper(),
        "/health/.." + path,
        "/health" + path,
        path + "/../health",
        path + "%2f..%2fhealth",
        path.replace("/", "/%2e/", 1),
        path + "?/health",
        path + "#/health",
        path + ";/health",
        path + "\x00/health",
        "http://test/health" + path,
        "/health%2f..%2f" + path.lstrip("/"),
        "/health%0a",
        "/health%00",
        "/Health",
        "//health",
        "/health/",
    ]


async def status_of(app, method: str, target: str, host: str, headers: list) -> int:
    path, _, query = target.partition("?")
    return (
        await asgi_call(
            app,
            method,
            urllib.parse.unquote(path),
            raw_path=path.encode("latin-1"),
            query=query.encode(),
            headers=[(b"host", host.encode()), *headers],
        )
    ).status


def keyed_app() -> tuple[ServerState, object]:
    client = FakeEngineClient()
    client.is_started = True
    digests = [key_digest(KEY), key_digest(OTHER)]
    state = ServerState(ServerConfig(model="m/fake", api_key_digests=digests), client)
    state.set_loaded()
    return state, make_app(state)


def test_nothing_but_the_open_paths_answers_without_a_key():
    async def check():
        state, app = keyed_app()
        paths = {route.path for route in all_routes(state) if isinstance(route, Route)}
        assert len(paths) > 8
        assert paths >= OPEN_PATHS
        paths |= {"/nowhere", "/v1", "/", "/admin"}
        bad = [
            [],
            [(b"authorization", b"Bearer " + KEY[:-1].encode())],
            [(b"authorization", b"Bearer ")],
            [(b"authorization", KEY.encode())],
            [(b"authorization", b"Basic " + KEY.encode())],
            [(b"authorization", b"Basic " + base64.b64encode(b"me:" + KEY[:-1].encode()))],
            [(b"authorization", b"Basic " + base64.b64encode(KEY.encode()))],
            [(b"authorization", b"Basic " + base64.b64encode(b"me:\xff"))],
            [(b"authorization", b"Digest " + base64.b64encode(b"me:" + KEY.encode()))],
            [(b"authorization", b"Bearer \xff\xfe")],
            [(b"authorization", b"Bearer x"), (b"authorization", b"Bearer " + KEY.encode())],
            [(b"x-api-key", KEY.encode())],
        ]
        for path, host in itertools.product(sorted(paths), HOSTS):
            for spelling in spellings(path):
                is_open = urllib.parse.unquote(spelling.partition("?")[0]) in OPEN_PATHS
                for headers in bad if host == "test" and spelling == path else bad[:1]:
                    for method in ("GET", "POST"):
                        status = await status_of(app, method, spelling, host, headers)
                        assert is_open or status == 401, (method, spelling, host, headers, status)
        await state.close()

    asyncio.run(check())


@pytest.mark.parametrize(
    "header",
    [
        b"bearer  " + KEY.encode(),
        b"Bearer " + OTHER.encode(),
        b"Basic " + base64.b64encode(b"anyone:" + KEY.encode()),
    ],
)
def test_a_good_key_opens_every_route(header):
    async def check():
        state, app = keyed_app()
        headers = [(b"authorization", header)]
        for route in all_routes(state):
            assert isinstance(route, Route)
            path = route.path.replace("{name:path}", "fake")
            method = "POST" if "POST" in (route.methods or ()) else "GET"
            status = await status_of(app, method, path, "test", headers)
            assert status in (200, 400, 415), (path, status)  # a POST comes without a body
        await state.close()

    asyncio.run(check())


def test_a_refusal_is_openais_error_and_tells_no_key():
    async def check():
        async with serving(api_key_digests=[key_digest(KEY)]) as http:
            reply = await http.get("/v1/models", headers={"Authorization": "Bearer wrong-key"})
            assert reply.status_code == 401
            assert reply.headers["www-authenticate"] == "Bearer"
            error = reply.json()["error"]
            assert error["code"] == "invalid_api_key"
            assert "wrong-key" not in reply.text
            assert KEY not in reply.text
            assert (await http.get("/health")).status_code == 200

    asyncio.run(check())


def test_only_the_page_makes_a_browser_ask():
    async def check():
        async with serving(api_key_digests=[key_digest(KEY)]) as http:
            page = await http.get("/")
            assert page.status_code == 401
            assert page.headers["www-authenticate"].startswith("Basic ")
            assert (await http.get("/", auth=("me", KEY))).status_code == 200
            assert (await http.get("/dashboard/state", auth=("me", KEY))).status_code == 200
            state = await http.get("/dashboard/state")
            assert state.headers["www-authenticate"] == "Bearer"

    asyncio.run(check())


def test_without_keys_everybody_may():
    async def check():
        async with serving() as http:
            assert (await http.get("/v1/models")).status_code == 200

    asyncio.run(check())


def test_salts_separate_keys_and_cannot_be_chosen():
    """With several keys each has a salt of its own; a client's own salt is mixed in, not put in its place."""

    async def check():
        async with serving(api_key_digests=[key_digest(KEY), key_digest(OTHER)]) as http:
            for key, own in itertools.product((KEY, OTHER, KEY), (None, "mine")):
                body = {"prompt": [5, 6, 7], "max_tokens": 1, "cache_salt": own}
                headers = {"Authorization": f"Bearer {key}"}
                reply = await http.post("/v1/completions", json=body, headers=headers)
                assert reply.status_code == 200, reply.text
            salts = [request.cache_salt for request in http.requests]
            assert salts[:2] == salts[4:]
            assert len(set(salts)) == 4
            assert {salt.kind for salt in salts} == {"api_key"}
            assert all(KEY not in salt.value and len(salt.value) == 64 for salt in salts)

    asyncio.run(check())


def test_keys_share_no_cached_pages():
    async def check():
        settings = {
            "api_key_digests": [key_digest(KEY), key_digest(OTHER)],
            "enable_prompt_tokens_details": True,
        }
        async with serving(**settings) as http:

            async def num_cached(key: str) -> int:
                body = {"prompt": list(range(5, 45)), "max_tokens": 1}
                headers = {"Authorization": f"Bearer {key}"}
                reply = await http.post("/v1/completions", json=body, headers=headers)
                details = reply.json()["usage"]["prompt_tokens_details"]
                return (details or {}).get("cached_tokens", 0)

            assert await num_cached(KEY) == 0
            assert await num_cached(OTHER) == 0
            assert await num_cached(KEY) > 30
            assert await num_cached(OTHER) > 30

    asyncio.run(check())


def test_senders_are_told_apart_by_key_else_by_address():
    """A client's own salt changes nothing about who it is."""

    async def senders(keys, headers) -> list[str]:
        async with serving(api_key_digests=[key_digest(key) for key in keys]) as http:
            for own, header in itertools.product(("a", "b"), headers):
                body = {"prompt": [5, 6, 7], "max_tokens": 1, "cache_salt": own}
                await http.post("/v1/completions", json=body, headers=header)
            return [request.sender for request in http.requests]

    async def check():
        bearers = [{"Authorization": f"Bearer {key}"} for key in (KEY, OTHER)]
        found = await senders((KEY, OTHER), bearers)
        assert found[:2] == found[2:]
        assert len(set(found)) == 2
        assert await senders((), [{}]) == ["127.0.0.1"] * 2

    asyncio.run(check())


def test_one_key_has_no_salt():
    async def check():
        async with serving(api_key_digests=[key_digest(KEY)]) as http:
            headers = {"Authorization": f"Bearer {KEY}"}
            body = {"prompt": [5, 6, 7], "max_tokens": 1}
            await http.post("/v1/completions", json=body, headers=headers)
            assert http.requests[0].cache_salt is None

    asyncio.run(check())
