"""The HTTP client reads what servers send, however it is framed, and uses a connection again when it may."""

import asyncio
import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.server.load.http_client import Address, BodyDecoder, HttpClient, HttpError, parse_head
from tests.server.load.sse_server import SseServer, serving

CHUNKED = b"4\r\nWiki\r\n6;x=y\r\npedia \r\nE\r\nin \r\n\r\nchunks.\r\n0\r\nX-Trailer: 1\r\n\r\n"


@given(st.lists(st.integers(0, len(CHUNKED))))
def test_chunks_however_cut(cuts):
    decoder = BodyDecoder({"transfer-encoding": "chunked"})
    ends = [0, *sorted(cuts), len(CHUNKED)]
    parts = [decoder.feed(CHUNKED[a:b]) for a, b in itertools.pairwise(ends)]
    assert b"".join(parts) == b"Wikipedia in \r\n\r\nchunks."
    assert decoder.done


def test_the_end_of_chunks_is_seen_with_and_without_trailers():
    for end, done in ((b"0\r\n\r\n", True), (b"0\r\n", False), (b"0\r\nA: b\r\n\r\n", True)):
        decoder = BodyDecoder({"transfer-encoding": "chunked"})
        assert decoder.feed(b"1\r\nx\r\n" + end) == b"x"
        assert decoder.done == done


def test_a_body_of_known_length_and_none():
    decoder = BodyDecoder({"content-length": "5"})
    assert decoder.feed(b"abc") == b"abc"
    assert not decoder.done
    assert decoder.feed(b"defgh") == b"de"
    assert decoder.done
    assert BodyDecoder({"content-length": "0"}).done
    assert BodyDecoder({}, has_body=False).done
    assert BodyDecoder({}).ends_with_connection


@pytest.mark.parametrize(
    ("headers", "data"),
    [
        ({"content-length": "-3"}, b""),
        ({"transfer-encoding": "chunked"}, b"zz\r\n"),
        ({"transfer-encoding": "chunked"}, b"\r\nx"),
        ({"transfer-encoding": "chunked"}, b"-1\r\nx"),
        ({"transfer-encoding": "chunked"}, b"1\r\nxyz"),
        ({"transfer-encoding": "chunked"}, b"1" * 5000),
    ],
)
def test_what_is_no_http_body_is_refused(headers, data):
    with pytest.raises(HttpError) as caught:
        BodyDecoder(headers).feed(data)
    assert caught.value.kind == "malformed"


def test_heads():
    assert parse_head(b"HTTP/1.1 204 No Content\r\nA: b\r\nX-Y:  c:d \r\n\r\n") == (
        204,
        {"a": "b", "x-y": "c:d"},
    )
    for head in (b"SSH-2.0\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/2 200\r\n\r\n"):
        with pytest.raises(HttpError):
            parse_head(head)


def test_addresses():
    address = Address.parse("http://127.0.0.1:8000/")
    assert (address.host, address.port, address.path) == ("127.0.0.1", 8000, "")
    assert Address.parse("http://[::1]:80/v1").host_header == "[::1]"
    assert Address.parse("https://x.example/api/v1/").path == "/api"
    assert Address.parse("https://x.example").port == 443
    for url in ("127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://x:99999", ""):
        with pytest.raises(ValueError, match=r"."):
            Address.parse(url)


def get(url: str, path: str, count: int = 1, **options: bool) -> list[tuple[int, bytes]]:
    async def run() -> list[tuple[int, bytes]]:
        client, found = HttpClient(Address.parse(url), **options), []
        for _ in range(count):
            async with client.request("GET", path) as response:
                found.append((response.status, await response.read()))
        await client.close()
        return found

    return asyncio.run(run())


def test_a_connection_serves_again_unless_told_not_to():
    server = SseServer()
    with serving(server) as url:
        answers = get(url, "/v1/models", 3)
        assert [status for status, _ in answers] == [200] * 3
        assert server.num_connections == 1
        get(url, "/nothing", 3, keep_alive=False)
        assert server.num_connections == 4
        assert server.headers["connection"] == "close"


async def answering(*answers: bytes):
    """A server whose connections each take one request, answer with the next of these and close."""
    left = iter(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(next(left))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, Address(scheme="http", host="127.0.0.1", port=server.sockets[0].getsockname()[1])


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def exchange(*answers: bytes, count: int = 1) -> list[bytes]:
    async def run() -> list[bytes]:
        server, address = await answering(*answers)
        client, found = HttpClient(address), []
        try:
            for _ in range(count):
                async with client.request("GET", "/") as response:
                    found.append(await response.read())
                await asyncio.sleep(0.05)
        finally:
            await client.close()
            server.close()
            await server.wait_closed()
        return found

    return asyncio.run(run())


def test_an_idle_connection_that_the_server_closed_is_replaced():
    assert exchange(OK, OK, count=2) == [b"ok", b"ok"]


def test_an_interim_answer_is_passed_over_and_a_body_may_end_with_the_connection():
    assert exchange(b"HTTP/1.1 100 Continue\r\n\r\n" + OK) == [b"ok"]
    assert exchange(b"HTTP/1.0 200 OK\r\n\r\nto the end") == [b"to the end"]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "unanswered"),
        (b"HTTP/1.1 200", "cut"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", "cut"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nab", "cut"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", "malformed"),
        (b"junk\r\n\r\n", "malformed"),
    ],
)
def test_answers_that_are_none(answer, kind):
    with pytest.raises(HttpError) as caught:
        exchange(answer)
    assert caught.value.kind == kind


def test_nobody_listens():
    async def run() -> None:
        server, address = await answering()
        server.close()
        await server.wait_closed()
        async with HttpClient(address).request("GET", "/"):
            pass

    with pytest.raises(HttpError, match=r"cannot connect to http://127\.0\.0\.1") as caught:
        asyncio.run(run())
    assert caught.value.kind == "refused"
