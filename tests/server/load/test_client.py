"""Requests over a real socket to a small server: what arrives is timed, what fails is counted by kind."""

import asyncio

import pytest

from jaxserve.server.load.client import LoadClient, ServerError, Target
from jaxserve.server.load.records import LoadRequest, RequestRecord
from tests.server.load.sse_server import SseServer, serving


@pytest.fixture(scope="module")
def server():
    return SseServer()


@pytest.fixture(scope="module")
def url(server):
    with serving(server) as url:
        yield url


def ask(url: str, prompt: str, backend: str = "openai", **target: object) -> RequestRecord:
    """One request; its record."""
    record = RequestRecord(index=0)

    async def run() -> None:
        client = LoadClient(Target(base_url=url, backend=backend, model="m", **target))  # type: ignore[arg-type]
        body = {"prompt": prompt}
        if backend == "openai-chat":
            body = {"messages": [{"role": "user", "content": prompt}]}
        await client.send(LoadRequest(body=body, num_prompt_tokens=7), record)
        await client.close()

    asyncio.run(run())
    return record


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_an_answer(url, server, backend):
    record = ask(url, "say 5", backend)
    assert record.is_good, record
    assert record.text == "alpha beta gamma delta alpha "
    assert record.finish_reason == "length"
    assert len(record.release_s) == 5
    assert sorted(record.release_s) == record.release_s
    assert record.sent_s <= record.release_s[0]
    assert record.ended_s is not None
    assert record.ended_s >= record.release_s[-1]
    assert (record.num_prompt_tokens, record.num_output_tokens) == (10, 10)
    assert record.num_cached_tokens == 3
    sent = server.bodies[-1]
    assert (sent["stream"], sent["stream_options"]) == (True, {"include_usage": True})
    assert sent["model"] == "m"


def test_without_usage_parts_are_counted(url):
    record = ask(url, "plain 3")
    assert (record.has_usage, record.num_output_tokens, record.num_prompt_tokens) == (False, 3, 7)


def test_gaps_are_those_of_the_server(url):
    record = ask(url, "slow 4 30")
    gaps = [b - a for a, b in zip(record.release_s, record.release_s[1:], strict=False)]
    assert all(gap >= 0.025 for gap in gaps), gaps
    assert record.ended_s is not None
    assert record.ended_s - record.release_s[-1] >= 0.025


def test_an_empty_output_has_its_first_token_at_its_end(url):
    record = ask(url, "empty", "openai-chat")
    assert record.is_good
    assert record.release_s == [record.ended_s]
    assert record.tpot_s is None


@pytest.mark.parametrize(
    ("prompt", "failure", "detail"),
    [
        ("status 429", "http_429", "as asked"),
        ("status 503", "http_503", "as asked"),
        ("broken 1", "error_event", "the engine died"),
        ("cut 1", "cut", "within the body"),
        ("short 1", "cut", "without finish_reason"),
        ("junk", "malformed", "JSON"),
        ("html", "malformed", "application/json"),
        ("hang", "timeout", "not done within 0.3 s"),
    ],
)
def test_failures_by_kind(url, prompt, failure, detail):
    record = ask(url, prompt, request_timeout_s=0.3)
    assert record.failure == failure
    assert detail in (record.detail or "")
    assert not record.is_good


def test_nobody_listens():
    record = ask("http://127.0.0.1:1", "say 1")
    assert record.failure == "refused"


def test_salt_and_extra_fields(url, server):
    ask(url, "say 1", extra_body={"top_k": 3, "cache_salt": "mine"}, cache_salt="run")
    assert (server.bodies[-1]["top_k"], server.bodies[-1]["cache_salt"]) == (3, "run/mine")
    ask(url, "say 1", cache_salt="run")
    assert server.bodies[-1]["cache_salt"] == "run"
    ask(url, "say 1")
    assert "cache_salt" not in server.bodies[-1]


def test_the_key_is_sent_and_not_shown():
    target = Target(base_url="http://x", api_key="secret-1")
    assert "secret-1" not in repr(target)
    server = SseServer(api_key="secret-1")
    with serving(server) as url:
        assert ask(url, "say 1", api_key="secret-1").is_good
        assert ask(url, "say 1").failure == "http_401"


def find_model(url: str) -> str:
    async def run() -> str:
        client = LoadClient(Target(base_url=url))
        try:
            return await client.find_model()
        finally:
            await client.close()

    return asyncio.run(run())


def test_the_model_is_found(url):
    assert find_model(url) == "tiny"


def test_a_server_without_models_is_named(url):
    with pytest.raises(ServerError, match="/v1/models: status 404: no route /nothing/v1/models"):
        find_model(f"{url}/nothing")
