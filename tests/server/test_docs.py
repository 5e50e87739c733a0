"""Every curl of docs/server.md is answered, and every endpoint has one; the tables name what there is."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.routing import Route

from jaxserve.cli.serve import serve_flags
from jaxserve.server.app import all_routes
from jaxserve.server.dashboard.files import FILES
from tests.server.conftest import serving
from tests.server.processes import ServerProcess, curl_parts

TEXT = (Path(__file__).parent.parent.parent / "docs" / "server.md").read_text()
CURLS = re.findall(r"^curl .*$", TEXT, re.MULTILINE)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess.fake(script="one two three") as server:
        yield server.wait_ready()


@pytest.mark.parametrize("command", CURLS)
def test_curl(command, server):
    path, headers, body = curl_parts(command)
    with server.http() as http:
        method = "GET" if body is None else "POST"
        reply = http.request(method, path, headers=headers, content=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-request-id"]
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        assert reply.text.endswith("data: [DONE]\n\n")
    elif reply.content and reply.headers["content-type"] == "application/json":
        assert "error" not in json.loads(reply.content)


def test_every_endpoint_has_a_curl():
    async def paths() -> set[str]:
        async with serving() as http:
            routes = all_routes(http.state)
        return {route.path for route in routes if isinstance(route, Route)}

    told = {curl_parts(command)[0] for command in CURLS}
    untold = {"/v1/models/{name:path}", *FILES} - {"/"}  # a name is needed; files of the page
    assert asyncio.run(paths()) - untold <= told


def test_flags_that_are_told_exist():
    known = set(serve_flags())
    own = TEXT.partition("## What it has to bear")[0]  # behind it come flags of a script
    for flag in set(re.findall(r"--(\w+)", own)) - {"help", "nodashboard"}:
        assert flag in known, flag
