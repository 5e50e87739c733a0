"""OpenAI's endpoints over a real (tiny) model: they say what `LLM` says. C10, C14, C22, C23, C45."""

import asyncio
import contextlib
import json
import math

import httpx
import pytest

from jaxserve.async_engine.thread import AsyncEngine
from jaxserve.cli import text_engine
from jaxserve.cli.main import main
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.app import make_app
from jaxserve.server.config import ServerConfig
from jaxserve.server.state import ServerState
from tests.cli.conftest import read_records
from tests.llms import FEW_BUCKETS, TINY, shared_llm
from tests.server.openai.calls import Call
from tests.server.replies import (
    check_schema,
    events_of,
    joined_chat,
    joined_completion,
    strict_json,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Once upon a time, Olá 🙂 there was"
MESSAGES = [{"role": "user", "content": "Say something nice."}]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def llm():
    return shared_llm(**FEW_BUCKETS)


@contextlib.asynccontextmanager
async def serving_llm(llm):
    """A client of the app over the engine of an `LLM`, which is idle again behind it."""
    engine = AsyncEngine.from_llm(llm)
    await engine.start()
    state = ServerState(ServerConfig(model=str(TINY)), engine)
    state.set_loaded()
    transport = httpx.ASGITransport(app=make_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield http
    await state.close()
    assert not llm.has_work()
    llm.engine.check_invariants()


def ask(llm, *calls):
    """The replies to (url, body), one after the other."""

    async def run():
        async with serving_llm(llm) as http:
            return [await http.post(url, json=body) for url, body in calls]

    replies = asyncio.run(run())
    assert all(reply.status_code == 200 for reply in replies), [r.text for r in replies]
    return replies


def close(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or math.isclose(a, b, abs_tol=1e-4)


def test_completions_say_what_generate_says(llm):
    body = {"prompt": PROMPT, **GREEDY, "logprobs": 3, "return_token_ids": True}
    whole, stream = ask(llm, (COMPLETIONS, body), (COMPLETIONS, body | {"stream": True}))
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
    (wanted,) = llm.generate(PROMPT, params)[0].outputs
    reply = strict_json(whole.content)
    check_schema("CreateCompletionResponse", reply)
    (choice,) = reply["choices"]
    assert choice["text"] == wanted.text
    assert choice["token_ids"] == wanted.token_ids
    assert choice["finish_reason"] == wanted.finish_reason
    close(choice["logprobs"]["token_logprobs"], wanted.logprobs)
    assert "".join(choice["logprobs"]["tokens"]) == wanted.text
    (streamed,) = joined_completion(events_of(stream))
    assert streamed["text"] == choice["text"]
    assert streamed["token_ids"] == choice["token_ids"]
    close(streamed["logprobs"]["token_logprobs"], wanted.logprobs)
    assert streamed["logprobs"]["text_offset"] == choice["logprobs"]["text_offset"]


def test_drawn_choices_are_those_of_generate(llm):
    fields = {"temperature": 1.0, "seed": 5, "n": 3, "max_tokens": 8}
    whole, stream = ask(
        llm,
        (COMPLETIONS, {"prompt": PROMPT, **fields}),
        (COMPLETIONS, {"prompt": PROMPT, "stream": True, **fields}),
    )
    wanted = [one.text for one in llm.generate(PROMPT, SamplingParams(**fields))[0].outputs]
    assert [one["text"] for one in whole.json()["choices"]] == wanted
    assert [one["text"] for one in joined_completion(events_of(stream))] == wanted


def test_c10_c23_a_prompt_is_scored_by_echo_and_by_prompt_logprobs(llm):
    """As evaluation tools ask: token ids, echo, logprobs, one token at most; cold and warm."""
    ids = llm.encode(PROMPT)
    echo = {"prompt": [ids], "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
    replies = ask(
        llm,
        *[(COMPLETIONS, echo | {"max_tokens": count}) for count in (0, 1, 1)],
        (COMPLETIONS, {"prompt": ids, "prompt_logprobs": 1, "max_tokens": 0}),
    )
    wanted = llm.score(ids)[0].logprobs
    scored = replies[-1].json()["choices"][0]["prompt_logprobs"]
    values = [None, *(e[str(i)]["logprob"] for i, e in zip(ids[1:], scored[1:], strict=True))]
    close(values, wanted)
    for reply in replies[:-1]:
        (choice,) = reply.json()["choices"]
        found = choice["logprobs"]
        close(found["token_logprobs"][: len(ids)], wanted)
        assert "".join(found["tokens"]) == choice["text"]
        assert choice["text"].startswith(PROMPT)
        for chosen, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True):
            assert chosen <= max(top.values())
            assert chosen in top.values()


def test_chat_says_what_chat_says(llm):
    body = {"messages": MESSAGES, **GREEDY, "logprobs": True, "top_logprobs": 2}
    whole, stream = ask(llm, (CHAT, body), (CHAT, body | {"stream": True}))
    wanted = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    reply = strict_json(whole.content)
    check_schema("CreateChatCompletionResponse", reply)
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == wanted.text
    data = b"".join(bytes(one["bytes"] or ()) for one in choice["logprobs"]["content"])
    assert data.decode("utf-8", "replace").startswith(wanted.text.rstrip("\ufffd"))
    (streamed,) = joined_chat(events_of(stream))
    assert streamed["message"]["content"] == wanted.text


def test_c22_no_option_makes_a_number_that_json_has_not(llm):
    for more in (
        {"temperature": 2.0, "seed": 1},
        {"temperature": 1.0, "top_k": 1},
        {"logit_bias": {"5": -100, "6": 100}},
        {"bad_words": ["the"]},
        {"allowed_token_ids": [10, 11, 12, 13, 14]},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ):
        for processed in (False, True):
            fields = {"logprobs": 20, "processed_logprobs": processed, "max_tokens": 6}
            (reply,) = ask(llm, (COMPLETIONS, {"prompt": PROMPT} | fields | more))
            found = strict_json(reply.content)["choices"][0]["logprobs"]
            values = [x for top in found["top_logprobs"] for x in top.values()]
            assert min(values) >= -9999.0
            assert max(values) <= 0.0


def test_schemas_hold(llm):
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    described = {"type": "json_schema", "json_schema": {"name": "kind", "schema": schema}}
    (reply,) = ask(llm, (CHAT, {"messages": MESSAGES, "response_format": described}))
    assert json.loads(reply.json()["choices"][0]["message"]["content"])["kind"] in ("a", "b")


@pytest.mark.parametrize("more", [{"stream": True}, {}, {"stream": True, "n": 3}])
def test_c14_a_client_that_leaves_gives_its_pages_back(llm, more):
    body = {"prompt": PROMPT, "max_tokens": 80, "ignore_eos": True} | more

    async def run():
        async with serving_llm(llm) as http:
            call = Call(http, COMPLETIONS, body)
            while llm.engine.stats().num_running == 0:
                await asyncio.sleep(0.001)
            if "stream" in more:
                await call.until(b"data: ")
            call.leave()
            await call.task
            for _ in range(2000):
                stats = llm.engine.stats()
                if stats.num_running + stats.num_waiting == 0:
                    return
                await asyncio.sleep(0.001)
            raise AssertionError("the request still runs")

    asyncio.run(run())


def test_c45_a_batch_file_has_the_replies_of_the_server(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(text_engine, "load_llm", lambda model, options: llm)
    calls = [
        (COMPLETIONS, {"prompt": [PROMPT, "a"], **GREEDY, "echo": True, "logprobs": 1}),
        (CHAT, {"messages": MESSAGES, **GREEDY}),
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(calls)
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    assert main(["run", f"--model={TINY}", f"--input={source}", f"--output={output}"]) == 0
    for record, reply in zip(read_records(output), ask(llm, *calls), strict=True):
        body, wanted = record["response"]["body"], reply.json()
        wanted["usage"].pop("prompt_tokens_details")  # depends on what ran before
        assert body["usage"] == wanted["usage"]
        for found, choice in zip(body["choices"], wanted["choices"], strict=True):
            assert found.get("message") == choice.get("message")
            assert found.get("text") == choice.get("text")
            assert found["finish_reason"] == choice["finish_reason"]
