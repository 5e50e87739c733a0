"""Real servers on tiny_llama: two processes, a model, signals; and what a killed or stuck engine does."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.server.processes import ServerProcess
from tests.server.streams import Stream

pytestmark = pytest.mark.timeout(400)


def engine_pid(server: ServerProcess) -> int:
    """The one child of a server."""
    (pid,) = children(server.pid)
    return pid


def children(pid: int) -> list[int]:
    done = subprocess.run(
        ["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, check=False
    )
    return [int(line) for line in done.stdout.split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening_ports(pid: int) -> set[str]:
    """Addresses that a process listens on, as the kernel tells."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd))
        except OSError:
            continue
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1])
    return found


def test_a_stream_and_a_whole_reply_are_equal(live_server):
    body = {"prompt": "hello world", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    with live_server.http() as http:
        reply = http.post("/v1/completions", json=body).json()
        stream = Stream(live_server, **body).wait_ended()
        assert stream.text == reply["choices"][0]["text"]
        assert reply["usage"]["completion_tokens"] == 20
        live_server.wait_until(lambda: http.get("/load").json() == {"server_load": 0})


def test_only_one_address_is_listened_on_and_none_by_the_engine(live_server):
    port = live_server.port
    assert listening_ports(live_server.pid) == {f"0100007F:{port:04X}"}
    assert listening_ports(engine_pid(live_server)) == set()


def test_cancelled_requests_leave_nothing_behind(live_server):
    """Clients that leave early, whole and streamed; then a request is answered at once."""
    threads = []
    with live_server.http() as http:

        def leave(number: int) -> None:
            body = {"prompt": [number + 5] * 9, "max_tokens": 400, "ignore_eos": True}
            body["stream"] = number % 2 == 0
            try:
                http.post("/v1/completions", json=body, timeout=0.2)
            except Exception:  # noqa: BLE001 - it times out, as it shall
                return

        for number in range(24):
            threads.append(threading.Thread(target=leave, args=(number,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        reply = http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 10})
        assert reply.status_code == 200
        live_server.wait_until(lambda: http.get("/load").json()["server_load"] == 0)

        def gauge(name: str) -> float:
            text = http.get("/metrics").text
            (line,) = (x for x in text.splitlines() if x.startswith(f"jaxserve:{name}"))
            return float(line.split()[-1])

        # The figures are the engine's last that arrived: they follow its replies by a message.
        live_server.wait_until(lambda: gauge("num_requests_running") == 0)
        live_server.wait_until(lambda: gauge("num_requests_waiting") == 0)


def test_a_killed_engine(programs):
    """Case C42 with a real engine: kill -9, health, the stream, new requests, exit code, no child."""
    with ServerProcess.tiny(programs) as server:
        engine = engine_pid(server.wait_ready())
        stream = Stream(server, max_tokens=490).wait_begun()
        with server.http() as http:
            http.get("/health")
            os.kill(engine, signal.SIGKILL)
            started = time.monotonic()
            server.wait_until(lambda: http.get("/health").status_code == 503)
            assert time.monotonic() - started < 1
            assert http.post("/v1/completions", json={"prompt": "hi"}).status_code == 503
        *_, last, done = stream.wait_ended().events
        assert json.loads(last)["error"]["code"] == "engine_dead"
        assert done == "[DONE]"
        assert server.wait_ended() == 1
        assert "SIGKILL" in server.log
        assert not is_alive(engine)


def test_a_stopped_engine_is_seen_by_the_watchdog(programs):
    """A step that hangs: SIGSTOP takes the engine's time away while a request waits."""
    with ServerProcess.tiny(programs, "--watchdog_timeout_s=3") as server:
        engine = engine_pid(server.wait_ready())
        stream = Stream(server, max_tokens=490).wait_begun()
        os.kill(engine, signal.SIGSTOP)
        with server.http() as http:
            server.wait_until(lambda: http.get("/health").status_code == 503)
        assert json.loads(stream.wait_ended().events[-2])["error"]["code"] == "engine_dead"
        assert server.wait_ended() == 1
        assert "hang" in server.log
        assert not is_alive(engine)


def test_sigterm_without_time(programs):
    with ServerProcess.tiny(programs) as server:
        engine = engine_pid(server.wait_ready())
        stream = Stream(server, max_tokens=490).wait_begun()
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 4
        assert json.loads(stream.wait_ended().events[-2])["error"]["code"] == "shutting_down"
        assert not is_alive(engine)


def test_sigterm_with_time(programs):
    """Case C42: streams of many tokens and queued requests; all are answered."""
    with ServerProcess.tiny(programs, "--shutdown_timeout=60") as server:
        engine = engine_pid(server.wait_ready())
        streams = [Stream(server, prompt=[i + 5] * 9, max_tokens=400) for i in range(6)]
        for stream in streams[:5]:  # let in, and perhaps at its end by now
            stream.wait_begun()
        assert server.stop() == 0
        for stream in streams:
            stream.wait_ended()
            if stream.status == 200:
                assert stream.events[-1] == "[DONE]"
                assert stream.num_tokens == 400
            else:
                assert stream.status == 503  # it came too late
        assert sum(stream.status == 200 for stream in streams) >= 5
        assert not is_alive(engine)


def test_a_model_that_is_not_there(tmp_path):
    with ServerProcess.tiny(tmp_path, f"--model={tmp_path}/nothing") as server:
        assert server.wait_ended() == 2
        last = server.lines[-1]
        assert last.startswith("jaxserve serve: ")
        assert "nothing" in last
        assert "Traceback" not in server.log


def test_a_killed_server_takes_its_engine_along(programs):
    with ServerProcess.tiny(programs) as server:
        engine = engine_pid(server.wait_ready())
        server.signal(signal.SIGKILL)
        assert server.wait_ended() == -signal.SIGKILL
        end = time.monotonic() + 10
        while is_alive(engine) and time.monotonic() < end:
            time.sleep(0.05)
        assert not is_alive(engine)
