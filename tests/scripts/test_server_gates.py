"""What `scripts/server_gates` measures with: each judgement passes what is good and finds what is not."""

import asyncio
import json
import subprocess
import sys

import numpy as np
import pytest

from jaxserve.server.load.http_client import Address, HttpClient
from jaxserve.server.load.records import RequestRecord
from jaxserve.server.load.run_load import LoadResult
from scripts.gates import fuzz, fuzz_cases, traffic
from scripts.gates.aborts import num_leaked
from scripts.gates.checks import Check, table
from scripts.gates.overload import middle_rate
from scripts.gates.soak import drift, p99s
from tests.server.load.sse_server import SseServer, serving

SAMPLE_CASES = [fuzz_cases.make_case(0, number) for number in range(3000)]


def test_cases_are_named_by_their_number():
    assert [fuzz_cases.make_case(0, n) for n in range(50)] == SAMPLE_CASES[:50]
    assert [fuzz_cases.make_case(1, n) for n in range(50)] != SAMPLE_CASES[:50]


def test_cases_reach_every_route_and_field():
    posted = [
        case for case in SAMPLE_CASES if case.method == "POST" and case.path in fuzz_cases.GOOD
    ]
    assert {case.path for case in posted} == set(fuzz_cases.GOOD)
    bodies = []
    for case in posted:
        try:
            bodies.append(json.loads(case.body or b""))
        except (ValueError, RecursionError):
            continue
    names = {name for body in bodies if isinstance(body, dict) for name in body}
    assert set(fuzz_cases._FIELDS) <= names
    assert len(bodies) < 0.95 * len(posted)  # some are no JSON at all
    assert len({case.path for case in SAMPLE_CASES}) > 25


def test_what_a_case_asks_for_is_bounded():
    assert max(len(case.body or b"") for case in SAMPLE_CASES) < 2**20
    assert all("content-length" not in case.headers for case in SAMPLE_CASES)


def test_raw_values_reach_the_wire():
    raw = fuzz_cases.Raw("NaN")
    assert fuzz_cases.dump({"a": [raw, 1, "NaN"], "b": None}) == '{"a": [NaN, 1, "NaN"], "b": null}'


ERROR = {"message": "m", "type": "t", "param": None, "code": None}


@pytest.mark.parametrize(
    ("status", "kind", "body", "fault"),
    [
        (200, "application/json", b"{}", None),
        (400, "application/json", json.dumps({"error": ERROR}).encode(), None),
        (400, "text/plain", b"Invalid HTTP request received.", None),
        (500, "application/json", b"{}", "status 500"),
        (422, "application/json", b"{}", "status 422"),
        (400, "application/json", b"{}", "no error object"),
        (400, "application/json", b"[1]", "no error object"),
        (400, "application/json", b'{"error": {"message": "m"}}', "an error without"),
        (400, "application/json", b'{"error": "Traceback (most"}', "inside"),
        (200, "text/event-stream", b"data: {}\n\ndata: [DONE]\n\n", None),
        (200, "text/event-stream", b"data: {}\n\n", "without end"),
        (200, "text/event-stream", b'data: {"error": {}}\n\ndata: [DONE]\n\n', "within a stream"),
        (
            200,
            "text/event-stream",
            b'data: {"error":{"type":"invalid_request_error"}}\n\ndata: [DONE]\n\n',
            None,
        ),
    ],
)
def test_answers_to_hostile_requests(status, kind, body, fault):
    found = fuzz._fault("POST", status, kind, body)
    assert (found is None) == (fault is None)
    assert (fault or "") in (found or "")


def record(sent: float, ended: float, failure: str | None = None) -> RequestRecord:
    one = RequestRecord(index=0, sent_s=sent, ended_s=ended, release_s=[ended], failure=failure)
    one.num_output_tokens = 2
    return one


def test_goodput_counts_the_middle_and_the_limit():
    # Sent from 0 to 10 s: what ends from 2 to 10 counts, if it took 5 s or less.
    records = [
        *(record(0, 1), record(0, 3), record(3, 9), record(4, 9), record(9, 11), record(9, 9.5)),
        record(10, 10, "http_429"),
    ]
    load = LoadResult(records=records, duration_s=11, lateness_s=[0.0] * 7, cpu_s=0)
    assert middle_rate(load, 5.0) == pytest.approx(3 / 8)
    assert middle_rate(load, np.inf) == pytest.approx(4 / 8)


def test_drift_sees_a_leak_and_no_noise():
    rng = np.random.default_rng(0)
    at = np.arange(240) * 0.5
    flat = 1000 + rng.normal(0, 3, 240) + 400 * np.minimum(at / 20, 1)  # fills up at first
    grown, slope = drift(list(zip(at, flat, strict=True)))
    assert abs(grown) < 3
    assert abs(slope) < 0.1
    grown, slope = drift(list(zip(at, flat + 2 * at, strict=True)))
    assert grown == pytest.approx(120, abs=5)
    assert slope == pytest.approx(2, abs=0.1)


def test_p99s():
    assert p99s([9.0] * 10 + [1.0] * 10 + [2.0] * 10) == (1, 2)
    assert np.isnan(p99s([1.0])).all()


def test_leaked_pages():
    names = ("free", "cached", "owned")
    found = {
        f'jaxserve:pages{{state="{name}"}}': x for name, x in zip(names, (70, 50, 0), strict=True)
    }
    assert num_leaked(found, 121) == 0
    assert num_leaked(found, 124) == 3


def test_the_table():
    good = Check(gate="g", what="w", found="1", wanted="0", passed=True)
    bad = Check(gate="g", what="v", found="1", wanted="0", passed=False, detail="why")
    lines = table([good, bad]).splitlines()
    assert lines[2:4] == ["| g | w | 1 | 0 | yes |", "| g | v | 1 | 0 | NO |"]
    assert lines[-1] == "g, v: why"


def test_drawn_requests_fit_and_vary():
    rng = np.random.default_rng(0)
    drawn = [traffic.draw_request(rng) for _ in range(500)]
    assert {route for route, _ in drawn} == {"/v1/completions", "/v1/chat/completions"}
    for _, body in drawn:
        prompts = body.get("prompt") or [0]
        prompts = prompts if isinstance(prompts[0], list) else [prompts]
        assert max(map(len, prompts)) + body["max_tokens"] <= traffic.MAX_MODEL_LEN
    for name in ("n", "cache_salt", "structured_outputs", "response_format", "stop", "logprobs"):
        assert any(name in body for _, body in drawn), name


def leave(phase: str, monkeypatch, prompt: str, limit_s: float = 20.0) -> traffic.Tally:
    body = {"prompt": prompt, "max_tokens": 3}
    monkeypatch.setattr(traffic, "draw_request", lambda rng: ("/v1/completions", body))
    tally = traffic.Tally()

    async def run(url: str) -> None:
        http = HttpClient(Address.parse(url))
        rng = np.random.default_rng(0)
        await traffic.send_and_leave(http, rng, phase, tally, limit_s=limit_s)
        await http.close()

    with serving(SseServer()) as url:
        asyncio.run(run(url))
    return tally


@pytest.mark.parametrize("phase", traffic.PHASES)
def test_clients_leave(phase, monkeypatch):
    tally = leave(phase, monkeypatch, "slow 80 10")
    assert tally.phases[phase] == 1
    assert tally.faults == []
    assert len(tally.ended_s) == (phase == "at the end")


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [("hang", "no end after 0.5 s"), ("status 500", "status 500"), ("cut 1", "cut: ")],
)
def test_what_may_not_happen_is_tallied(prompt, fault, monkeypatch):
    tally = leave("at the end", monkeypatch, prompt, limit_s=0.5 if prompt == "hang" else 20.0)
    assert len(tally.faults) == 1
    assert fault in tally.faults[0]
    assert tally.num_server_errors == (prompt == "status 500")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gates=cancel,nothing"], "no 'nothing'; known: cancel, aborts"),
        (["--minutes=0"], "--minutes must be above 0"),
        (["--seed=-1"], "--seed must be at least 0"),
    ],
)
def test_bad_flags(flags, words, repository):
    command = [sys.executable, repository / "scripts" / "server_gates", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words in done.stderr
