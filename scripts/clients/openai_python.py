"""openai for Python against the server: sync, async, streams, parse, tools, errors.

Run by `scripts/run_clients` in the client's own environment.
"""

import asyncio
import json
from typing import Literal

import openai
from pydantic import BaseModel

from scripts.clients.checks import (
    CHAT,
    TOOL,
    equal,
    is_weather,
    require,
    run_checks,
    server_of_arguments,
)

SERVER = server_of_arguments()
CLIENT = openai.OpenAI(base_url=SERVER.base_url, api_key=SERVER.key, max_retries=0, timeout=120)
ASYNC = openai.AsyncOpenAI(base_url=SERVER.base_url, api_key=SERVER.key, max_retries=0, timeout=120)
MODEL = {"model": SERVER.model}
GREEDY = {**MODEL, "temperature": 0, "seed": 7}


class Answer(BaseModel):
    colour: Literal["red", "green"]
    count: Literal[1, 2]


class get_weather(BaseModel):
    city: Literal["Oslo", "Bergen"]


def models() -> None:
    (card,) = CLIENT.models.list().data
    equal(card.id, SERVER.model, "id")
    equal(CLIENT.models.retrieve(SERVER.model).id, SERVER.model, "id of the one")


def completions() -> None:
    whole = CLIENT.completions.create(**GREEDY, prompt="hello", max_tokens=12, logprobs=2)
    (choice,) = whole.choices
    equal("".join(choice.logprobs.tokens), choice.text, "tokens of the logprobs")
    equal(whole.usage.completion_tokens, len(choice.logprobs.tokens), "completion_tokens")
    stream = CLIENT.completions.create(
        **GREEDY,
        prompt="hello",
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    equal("".join(c.choices[0].text for c in chunks if c.choices), choice.text, "streamed text")
    equal(chunks[-1].usage, whole.usage, "usage")
    several = CLIENT.completions.create(
        **GREEDY, prompt=["hello", "there"], n=2, max_tokens=4, echo=True
    )
    equal([c.index for c in several.choices], [0, 1, 2, 3], "indices")
    require(several.choices[2].text.startswith("there"), "echo gives the prompt back")


def chat() -> None:
    fields = {**GREEDY, "messages": CHAT, "max_completion_tokens": 16}
    whole = CLIENT.chat.completions.create(**fields, logprobs=True, top_logprobs=3)
    (choice,) = whole.choices
    require(choice.finish_reason in ("stop", "length"), f"finish_reason {choice.finish_reason}")
    equal(choice.message.role, "assistant", "role")
    entries = choice.logprobs.content
    told = b"".join(bytes(e.bytes) for e in entries)
    equal(told.decode(errors="replace"), choice.message.content, "bytes of the tokens")
    require(all(len(e.top_logprobs) == 3 for e in entries), "three top_logprobs each")
    chunks = list(
        CLIENT.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    equal(chunks[0].choices[0].delta.role, "assistant", "role of the first chunk")
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    equal(text, choice.message.content, "streamed content")
    equal(chunks[-1].usage, whole.usage, "usage")
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    equal([r for r in reasons if r], [choice.finish_reason], "finish_reason comes once")
    two = CLIENT.chat.completions.create(**MODEL, messages=CHAT, n=2, max_tokens=4, stop=["\n"])
    equal([c.index for c in two.choices], [0, 1], "indices")


def stream_helper() -> None:
    """It raises where a text was cut off, so the text has to end by itself."""
    texts = {"structured_outputs": {"choice": ["Zürich 🙂 is a city.", "Zürich 🙂 is a town."]}}
    fields = {**GREEDY, "messages": CHAT, "extra_body": texts}
    with CLIENT.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    whole = CLIENT.chat.completions.create(**fields)
    equal(final.choices[0].message.content, whole.choices[0].message.content, "content")
    require("content.done" in kinds, f"events {set(kinds)}")


def parse() -> None:
    fields = {**MODEL, "messages": CHAT, "response_format": Answer, "max_tokens": 60}
    message = CLIENT.chat.completions.parse(**fields).choices[0].message
    require(isinstance(message.parsed, Answer), f"parsed: {message.parsed!r}")
    with CLIENT.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion()
    require(isinstance(final.choices[0].message.parsed, Answer), "parsed from a stream")
    anything = CLIENT.chat.completions.create(
        **GREEDY, messages=CHAT, max_tokens=60, response_format={"type": "json_object"}
    )
    require(anything.choices[0].message.content.startswith("{"), "json_object begins an object")


def tools() -> None:
    fields = {**GREEDY, "messages": CHAT, "tools": [TOOL], "max_tokens": 80}
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        fields |= {"tool_choice": choice, "parallel_tool_calls": False}
        whole = CLIENT.chat.completions.create(**fields)
        equal(whole.choices[0].finish_reason, "tool_calls", "finish_reason")
        (call,) = whole.choices[0].message.tool_calls
        equal(whole.choices[0].message.content, None, "content beside the call")
        require(is_weather(call.function.arguments), f"arguments {call.function.arguments}")
        with CLIENT.chat.completions.stream(**fields) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        (streamed,) = final.choices[0].message.tool_calls
        equal(streamed.function.arguments, call.function.arguments, "streamed arguments")
        equal(streamed.function.name, call.function.name, "streamed name")
        require(kinds.count("tool_calls.function.arguments.delta") > 1, "arguments in fragments")
    for choice in ("auto", "none"):
        text = CLIENT.chat.completions.create(**fields | {"tool_choice": choice, "max_tokens": 8})
        require(text.choices[0].finish_reason in ("stop", "length"), "ends as text")
    call_again = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": -3})},
    ]
    after = CLIENT.chat.completions.create(
        **fields | {"messages": call_again, "tool_choice": "auto"}
    )
    require(after.choices[0].message.role == "assistant", "an answer to a tool's result")


def parsed_tools() -> None:
    tool = openai.pydantic_function_tool(get_weather)
    parsed = CLIENT.chat.completions.parse(
        **MODEL, messages=CHAT, tools=[tool], tool_choice="required", max_tokens=80, n=2,
        parallel_tool_calls=False,
    )  # fmt: skip
    for choice in parsed.choices:
        (call,) = choice.message.tool_calls
        require(isinstance(call.function.parsed_arguments, get_weather), "parsed arguments")
    ids = {choice.message.tool_calls[0].id for choice in parsed.choices}
    equal(len(ids), 2, "number of ids")


def errors() -> None:
    for error, fields in (
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"max_tokens": 10**9, "n": 1000}),
        (openai.NotFoundError, {"model": "no-such-model"}),
    ):
        try:
            CLIENT.chat.completions.create(**{**MODEL, "messages": CHAT, **fields})
        except error as caught:
            body = caught.body
            equal(set(body), {"message", "type", "param", "code"}, "fields of the error")
        else:
            require(False, f"{fields} raised nothing")
    try:
        CLIENT.with_options(api_key="wrong").models.list()
    except openai.AuthenticationError:
        return
    require(False, "a wrong key raised nothing")


def headers() -> None:
    raw = CLIENT.chat.completions.with_raw_response.create(
        **MODEL, messages=CHAT, max_tokens=2, extra_headers={"X-Request-Id": "from-the-client"}
    )
    equal(raw.headers["x-request-id"], "from-the-client", "x-request-id")
    equal(raw.parse()._request_id, "from-the-client", "_request_id")
    extra = {"top_k": 5, "min_tokens": 2, "unheard_of": True}
    CLIENT.chat.completions.create(**MODEL, messages=CHAT, max_tokens=2, extra_body=extra)


def leaving() -> None:
    """A stream that is left early, and requests behind it."""
    for _ in range(4):
        stream = CLIENT.chat.completions.create(
            **MODEL, messages=CHAT, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    chat()


def many_at_once() -> None:
    async def one(index: int) -> str:
        reply = await ASYNC.chat.completions.create(
            **GREEDY, messages=[{"role": "user", "content": f"number {index}"}], max_tokens=8
        )
        return reply.choices[0].message.content or ""

    async def streamed(index: int) -> str:
        stream = await ASYNC.chat.completions.create(
            **GREEDY,
            messages=[{"role": "user", "content": f"number {index}"}],
            max_tokens=8,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def check() -> None:
        whole = await asyncio.gather(*map(one, range(12)))
        parts = await asyncio.gather(*map(streamed, range(12)))
        equal(parts, whole, "streams beside each other")
        left = asyncio.create_task(one(99))
        await asyncio.sleep(0.01)
        left.cancel()
        async for _ in ASYNC.models.list():
            pass

    asyncio.run(check())


run_checks(
    {
        f.__name__: f
        for f in (
            models, completions, chat, stream_helper, parse, tools, parsed_tools, errors, headers,
            leaving, many_at_once,
        )
    }
)  # fmt: skip
