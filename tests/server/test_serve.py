"""The life of a server process, over a fake engine: readiness, drain, signals, a dead engine, exit codes."""

import json
import signal
import socket
import time

import pytest

from tests.server.processes import ServerProcess
from tests.server.streams import Stream

SCRIPT = "one two three four five six seven eight nine ten"


def port_is_free(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


def test_health_is_503_until_the_engine_is_warm():
    with ServerProcess.fake(start_s=1.5) as server, server.http() as http:
        reply = http.get("/health")
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "loading"
        for url in ("/v1/models", "/nowhere"):
            assert http.get(url).status_code in (503, 404)
        body = {"prompt": "hi"}
        assert http.post("/v1/completions", json=body).status_code == 503
        assert http.post("/tokenize", json=body).status_code == 503
        server.wait_ready()
        assert http.get("/health").status_code == 200
        assert server.stop() == 0


def test_sigterm_at_idle_ends_it_with_0_and_frees_the_port():
    with ServerProcess.fake() as server:
        port = server.wait_ready().port
        with server.http() as http:  # a connection that is kept open holds nothing up
            assert http.get("/health").status_code == 200
            started = time.monotonic()
            assert server.stop() == 0
        assert time.monotonic() - started < 4
        assert port_is_free(port)


def test_sigterm_while_it_loads_ends_it():
    with ServerProcess.fake(start_s=100) as server:
        assert server.port
        assert server.stop() == 0


def test_a_drain_lets_streams_end_and_refuses_new_requests():
    """Case C42: a stream and a queued request at SIGTERM; both are answered, new ones get a 503."""
    config = {"shutdown_timeout_s": 30}
    client = {"script": SCRIPT, "step_s": 0.05, "max_num_seqs": 1}
    with ServerProcess.fake(config=config, **client) as server:
        port = server.wait_ready().port
        stream = Stream(server, max_tokens=50).wait_begun()
        queued = Stream(server, max_tokens=2)
        with server.http() as http:
            server.wait_until(lambda: http.get("/load").json()["server_load"] == 2)
            server.signal(signal.SIGTERM)
            server.wait_for_line("SIGTERM")
            reply = http.post("/v1/completions", json={"prompt": "hi"})
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "shutting_down"
            assert http.get("/health").status_code == 503
        assert server.wait_ended() == 0
        assert stream.wait_ended().events[-1] == "[DONE]"
        assert queued.wait_ended().events[-1] == "[DONE]"
        assert len(stream.events) == 51
        assert "error" not in "".join(stream.events + queued.events)
        assert port_is_free(port)


def test_a_drain_without_time_ends_streams_with_an_error():
    with ServerProcess.fake(script=SCRIPT, step_s=0.05) as server:
        stream = Stream(server.wait_ready()).wait_begun()
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 4
        *_, last, done = stream.wait_ended().events
        assert json.loads(last)["error"]["code"] == "shutting_down"
        assert done == "[DONE]"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(second):
    config = {"shutdown_timeout_s": 1000}
    with ServerProcess.fake(config=config, script=SCRIPT, step_s=0.05) as server:
        stream = Stream(server.wait_ready()).wait_begun()
        server.signal(signal.SIGTERM)
        server.wait_for_line("SIGTERM")
        server.signal(second)
        assert server.wait_ended() == 128 + second
        assert json.loads(stream.wait_ended().events[-2])["error"]["code"] == "shutting_down"


def test_a_client_that_does_not_read_holds_no_drain_up():
    client = {"script": SCRIPT, "max_model_len": 30_000, "num_pages": 20_000}
    body = (
        b'{"prompt": "hi", "max_tokens": 29000, "ignore_eos": true, "stream": true, "logprobs": 5}'
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    with ServerProcess.fake(**client) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.wait_ready().port))
        sock.sendall(head.encode() + body)
        with server.http() as http:
            server.wait_until(lambda: http.get("/load").json()["server_load"] == 1)
        time.sleep(2)  # by now the buffers on its way are full
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 4


def test_a_dead_engine_is_seen_at_once_and_ends_everything():
    """Case C42: health, an open stream, a request that is not streamed, a new one, the exit code."""
    with ServerProcess.fake(script=SCRIPT, step_s=0.05) as server:
        stream = Stream(server.wait_ready()).wait_begun()
        plain = Stream(server, stream=False)
        with server.http() as http:
            server.wait_until(lambda: http.get("/load").json()["server_load"] == 2)
            server.signal(signal.SIGUSR1)
            started = time.monotonic()
            server.wait_until(lambda: http.get("/health").status_code == 503)
            assert time.monotonic() - started < 1
            assert http.get("/health").json()["error"]["code"] == "engine_dead"
            reply = http.post("/v1/completions", json={"prompt": "hi"})
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "engine_dead"
        *_, last, done = stream.wait_ended().events
        assert json.loads(last)["error"]["code"] == "engine_dead"
        assert done == "[DONE]"
        assert plain.wait_ended().status == 503
        assert server.wait_ended() == 1
        assert "the engine failed: its process was killed" in server.log


def test_a_port_that_is_taken_is_an_error_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ServerProcess.fake(config={"port": port}) as server:
            assert server.wait_ended() == 1
            assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in server.log
            assert "while attempting" not in server.log
            assert "loading" not in server.log
