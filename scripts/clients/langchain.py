"""langchain-openai against the server: chat, streams, tools, structured output, completions.

Run by `scripts/run_clients` in the client's own environment.
"""

import asyncio
from typing import Literal

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from scripts.clients.checks import equal, require, run_checks, server_of_arguments

SERVER = server_of_arguments()
COMMON = {
    "model": SERVER.model,
    "base_url": SERVER.base_url,
    "api_key": SERVER.key,
    "max_retries": 0,
    "temperature": 0,
}
CHAT = ChatOpenAI(**COMMON, max_tokens=16, stream_usage=True)
LONGER = ChatOpenAI(**COMMON, max_tokens=90)
MESSAGES = [SystemMessage("Be brief."), HumanMessage("Say something of Zürich 🙂.")]


class Answer(BaseModel):
    """An answer."""

    colour: Literal["red", "green"] = Field(description="which one")
    count: Literal[1, 2]


@tool
def get_weather(city: Literal["Oslo", "Bergen"]) -> str:
    """The weather of a city."""
    return f"-3 degrees in {city}"


def invoke_and_stream() -> None:
    whole = CHAT.invoke(MESSAGES)
    chunks = list(CHAT.stream(MESSAGES))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined = joined + chunk
    equal(joined.content, whole.content, "streamed content")
    equal(joined.usage_metadata, whole.usage_metadata, "usage")
    require(whole.usage_metadata["output_tokens"] <= 16, "max_tokens is kept")
    equal(whole.response_metadata["model_name"], SERVER.model, "model_name")


def batch_and_async() -> None:
    prompts = [[HumanMessage(f"number {i}")] for i in range(6)]
    found = [reply.content for reply in CHAT.batch(prompts)]

    async def check() -> list:
        replies = await asyncio.gather(*(CHAT.ainvoke(prompt) for prompt in prompts))
        return [reply.content for reply in replies]

    equal(asyncio.run(check()), found, "ainvoke")


def logprobs() -> None:
    reply = CHAT.bind(logprobs=True, top_logprobs=2).invoke(MESSAGES)
    entries = reply.response_metadata["logprobs"]["content"]
    require(entries and all(len(e["top_logprobs"]) == 2 for e in entries), "top_logprobs")


def tools() -> None:
    forced = LONGER.bind_tools([get_weather], tool_choice="get_weather")
    reply = forced.invoke(MESSAGES)
    (call,) = reply.tool_calls
    equal(call["name"], "get_weather", "name")
    result = get_weather.invoke(call)
    require(isinstance(result, ToolMessage), "the tool ran with these arguments")
    chunks = list(forced.stream(MESSAGES))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined = joined + chunk
    equal([c["args"] for c in joined.tool_calls], [call["args"]], "streamed call")
    equal(reply.invalid_tool_calls, [], "invalid calls")
    required = LONGER.bind_tools([get_weather], tool_choice="required").invoke(MESSAGES)
    require(required.tool_calls, "a required call")
    free = LONGER.bind_tools([get_weather])
    free.invoke([*MESSAGES, reply, result])
    LONGER.bind_tools([get_weather], strict=True, parallel_tool_calls=False).invoke(MESSAGES)


def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        for strict in (None, True):
            found = LONGER.with_structured_output(Answer, method=method, strict=strict).invoke(
                MESSAGES
            )
            require(isinstance(found, Answer), f"{method}: {found!r}")
    raw = LONGER.with_structured_output(Answer, include_raw=True).invoke(MESSAGES)
    equal(raw["parsing_error"], None, "parsing_error")


def completions() -> None:
    model = OpenAI(**COMMON, max_tokens=8)
    whole = model.invoke("hello")
    equal("".join(model.stream("hello")), whole, "streamed text")
    equal(len(model.generate(["a", "b", "c"]).generations), 3, "several prompts")


run_checks(
    {
        f.__name__: f
        for f in (
            invoke_and_stream,
            batch_and_async,
            logprobs,
            tools,
            structured_output,
            completions,
        )
    }
)
