"""Over real sockets: what is no HTTP, what is too large, what is too slow to send or to read."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from jaxserve.server.config import MAX_HEADER_BYTES, ServerConfig
from jaxserve.server.connections import connection_class
from tests.server.processes import PATIENCE_S, ServerProcess

SCRIPT = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    config = {"body_timeout_s": 1.0, "send_timeout_s": 1.0, "max_body_bytes": 100_000}
    client = {"script": SCRIPT, "max_model_len": 30_000, "num_pages": 20_000}
    with ServerProcess.fake(config=config, **client) as server:
        yield server.wait_ready()
        assert server.stop() == 0
        assert "Traceback" not in server.log


def connect(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    data = b""
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def talk(server: ServerProcess, data: bytes) -> tuple[int, dict]:
    """(status, JSON body) of the last answer to some bytes; the connection is closed behind it."""
    with connect(server) as sock:
        sock.sendall(data)
        return parsed(read_all(sock))


def parsed(answer: bytes) -> tuple[int, dict]:
    head, _, body = answer.rpartition(b"\r\n\r\n")
    assert head, answer
    return int(head.split(b"\r\n")[0].split(b" ")[1]), json.loads(body) if body else {}


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


CLOSE = "Connection: close"


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",  # TLS to a port without it
        b"hello\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked, x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nBad header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_no_http_is_a_400_in_openais_shape(server, data):
    status, reply = talk(server, data)
    assert status == 400
    assert reply["error"]["type"] == "invalid_request_error"
    assert reply["error"]["code"] == "invalid_http"


def test_a_chunk_that_is_none_is_a_400_or_ends_the_connection(server):
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    head += b"Content-Type: application/json\r\n\r\n"
    with connect(server) as sock:
        sock.sendall(head + b"zz\r\n{}\r\n0\r\n\r\n")
        answer = read_all(sock)
    assert not answer or parsed(answer)[0] == 400


def test_a_chunked_body_is_read(server):
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    head += b"Connection: close\r\nContent-Type: application/json\r\n\r\n"
    with connect(server) as sock:
        sock.sendall(head + b'a\r\n{"prompt":\r\n5\r\n"hi"}\r\n0\r\n\r\n')
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"count"' in answer


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * MAX_HEADER_BYTES,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * MAX_HEADER_BYTES,
        b"GET /" + b"a" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nHost: localhost\r\n",
        b"GET /" + b"a" * (4 * MAX_HEADER_BYTES),
    ],
    ids=["one header", "many headers", "a path", "a path without end"],
)
@pytest.mark.parametrize("is_whole", [False, True], ids=["cut off", "whole"])
def test_headers_without_end_are_a_431(server, head, is_whole):
    status, reply = talk(server, head + (b"\r\n\r\n" if is_whole else b""))
    assert status in ((431, 400) if is_whole and b"HTTP" not in head else (431,))
    assert reply["error"]["code"] in ("headers_too_large", "invalid_http")


def test_a_body_that_is_too_large_is_a_413_that_its_sender_can_read(server):
    status, reply = talk(server, post("/tokenize", b'{"prompt":"' + b"a" * 3_000_000 + b'"}'))
    assert status == 413
    assert "100000" in reply["error"]["message"]
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    head += b"Content-Type: application/json\r\n\r\n"
    chunk = b"2710\r\n" + b"a" * 10_000 + b"\r\n"
    assert talk(server, head + chunk * 20 + b"0\r\n\r\n")[0] == 413


def test_a_client_that_asks_before_it_sends_is_told_not_to(server):
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
    status, _ = talk(server, head)
    assert status == 413


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", 408),
        (b"GET /health HT", 408),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", 408),
        (post("/tokenize", b"{" * 10)[:-1], 408),
    ],
    ids=["nothing", "half a line", "no end of headers", "half a body"],
)
def test_a_client_that_stops_sending_is_given_up(server, data, status):
    assert talk(server, data)[0] == status


def test_a_client_that_sends_a_byte_at_a_time_gains_no_time(server):
    with connect(server) as sock:
        started = time.monotonic()
        for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 1000:
            try:
                sock.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.05)
            if time.monotonic() > started + 20:
                raise AssertionError("it is still listened to")
        assert parsed(read_all(sock))[0] == 408


def test_requests_behind_each_other_on_one_connection(server):
    one = post("/tokenize", b'{"prompt": "hi"}')
    with connect(server) as sock:
        sock.sendall(one * 3 + post("/tokenize", b"[]", CLOSE))
        answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b"HTTP/1.1 400 ") == 1


def test_http_1_0_and_head(server):
    with connect(server) as sock:
        sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 200 OK")
    with connect(server) as sock:
        sock.sendall(b"HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert not body


def test_an_upgrade_is_answered_as_a_plain_request(server):
    upgrade = (
        "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    )
    upgrade += "Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n"
    with connect(server) as sock:
        sock.sendall(upgrade.encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")


def test_a_client_that_does_not_read_is_dropped_and_disturbs_nobody(server):
    body = {
        "prompt": "hi",
        "max_tokens": 29_000,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 5,
        "n": 2,
    }
    with socket.socket() as sock, server.http() as http:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(post("/v1/completions", json.dumps(body).encode(), "X-Request-Id: slow"))
        server.wait_until(lambda: http.get("/load").json()["server_load"] == 1)
        for _ in range(3):
            reply = http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 5})
            assert reply.json()["choices"][0]["text"].startswith("one two")
        server.wait_for_line("request slow: dropped, its client read nothing for 1 s")
        server.wait_until(lambda: http.get("/load").json()["server_load"] == 0)
        assert b"[DONE]" not in read_all(sock)


def test_a_client_that_leaves_in_the_middle_is_aborted(server):
    body = b'{"prompt": "hi", "max_tokens": 29000, "ignore_eos": true, "stream": true}'
    with server.http() as http:
        with connect(server) as sock:
            sock.sendall(post("/v1/completions", body))
            assert sock.recv(1000).startswith(b"HTTP/1.1 200 OK")
        server.wait_until(lambda: http.get("/load").json()["server_load"] == 0)
        with connect(server) as sock:  # not streamed
            sock.sendall(post("/v1/completions", body.replace(b"true}", b"false}")))
            server.wait_until(lambda: http.get("/load").json()["server_load"] == 1)
        server.wait_until(lambda: http.get("/load").json()["server_load"] == 0)


def test_one_connection_too_many_is_refused_and_those_before_are_served():
    with ServerProcess.fake(config={"max_connections": 3}) as server:
        server.wait_ready()
        with connect(server) as first, connect(server) as second, connect(server):
            sock = connect(server)
            status, body = parsed(read_all(sock))  # nothing was asked yet
            sock.close()
            assert status == 503
            assert body["error"]["code"] == "too_many_connections"
            assert "has 3 connections, which is its limit" in body["error"]["message"]
            for one in (first, second):
                one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert one.recv(1000).startswith(b"HTTP/1.1 200 OK")
        server.wait_until(lambda: is_served(server))  # they are gone
        assert server.stop() == 0
        assert "Traceback" not in server.log


def is_served(server: ServerProcess) -> bool:
    """Whether a new connection is."""
    try:
        with server.http() as http:
            return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def most_memory_kb(server: ServerProcess) -> int:
    text = Path(f"/proc/{server.pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0])


def is_open(server: ServerProcess, sock: socket.socket) -> bool:
    """Whether the server has the other end of this connection open."""
    ports = [f":{port:04X}" for port in (server.port, sock.getsockname()[1])]
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return any(
        line[1].endswith(ports[0]) and line[2].endswith(ports[1]) and line[3] == "01"
        for line in lines
    )


def flood_until_closed(sock: socket.socket, data: bytes) -> None:
    try:
        for _ in range(200):
            sock.sendall(data)
    except OSError:
        return
    raise AssertionError("it is still listened to")


CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
CHUNKED += b"Content-Type: application/json\r\n\r\n"


@pytest.mark.parametrize(
    "line",
    [b"a: b\r\n", b"a" * 64, b"a: " + b"b" * 1000],
    ids=["many trailers", "a name without end", "a value without end"],
)
def test_trailers_without_end_are_not_kept(server, line):
    before = most_memory_kb(server)
    flood = line * (2**20 // len(line))
    with connect(server) as sock:
        sock.sendall(CHUNKED + b"2\r\n{}\r\n0\r\n" + line)
        flood_until_closed(sock, flood)
    assert most_memory_kb(server) < before + 20_000


def test_the_first_line_of_a_chunk_ends(server):
    with connect(server) as sock:
        sock.sendall(CHUNKED + b"2;")
        flood_until_closed(sock, b"a" * 2**20)


def test_headers_behind_a_large_body_are_not_taken_for_large_ones(server):
    """Both come in one piece, and what is whole by then does not count."""
    body = b'{"prompt":"' + b"a" * 90_000 + b'"}'
    with connect(server) as sock:
        sock.sendall(post("/tokenize", body) + b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        time.sleep(0.1)
        sock.sendall(b"Connection: close\r\n\r\n")
        answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("end", ["Connection: close", "Connection: keep-alive"])
def test_a_reply_that_nobody_reads_is_not_kept(server, end):
    body = json.dumps({"prompt": "a " * 45_000, "return_token_strs": True}).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(post("/tokenize", body, end, "X-Request-Id: unread"))
        time.sleep(0.5)
        assert is_open(server, sock)
        server.wait_until(lambda: not is_open(server, sock))


class FakeTransport:
    """Of a client that has left `num_unread` bytes of a reply."""

    def __init__(self, num_unread: list[int]) -> None:
        self._num_unread = num_unread
        self.is_aborted = self.is_closed = False

    def get_write_buffer_size(self) -> int:
        return self._num_unread.pop(0) if len(self._num_unread) > 1 else self._num_unread[0]

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


async def answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * 5000})


@pytest.mark.parametrize("end", ["close", "keep-alive"])
@pytest.mark.parametrize(
    ("num_unread", "is_aborted"),
    [([5000], True), ([5000, 4000, 3000, 2000, 1000, 0], False), ([0], False), ([9, 8, 8], True)],
)
def test_what_is_left_of_a_reply_is_read_or_its_connection_ends(end, num_unread, is_aborted):
    """Also where it fits into the buffer, so that its request has ended long ago."""

    async def check():
        config = ServerConfig(model="x", send_timeout_s=0.03, body_timeout_s=60)
        protocol = connection_class(config)(
            config=uvicorn.Config(answer, log_config=None, lifespan="off"),
            server_state=uvicorn.server.ServerState(),
            app_state={},
        )
        transport = FakeTransport(num_unread)
        protocol.connection_made(transport)
        head = f"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: {end}\r\n\r\n"
        protocol.data_received(head.encode())
        await asyncio.sleep(0.3)
        assert transport.is_aborted == is_aborted
        protocol.connection_lost(None)

    asyncio.run(check())
