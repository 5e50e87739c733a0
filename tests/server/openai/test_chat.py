"""C37, C38, C39: conversations and what bodies say of them."""

import asyncio
import json

import pytest

from jaxserve.server.openai.chat import FIELDS
from jaxserve.text.tokenizer import Tokenizer
from tests.llms import TINY
from tests.server.conftest import serving
from tests.server.fake_client import FakeEngineClient
from tests.server.replies import check_schema, error_of, events_of, joined_chat, strict_json

URL = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
STRICT_TEMPLATE = """{% for m in messages %}
{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% if not loop.first and messages[loop.index0 - 1].role == m.role %}
{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}
{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}
{% endfor %}"""
TOOLS_TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if enable_thinking %}think{% endif %}<tool_call>{'name': f, 'arguments': {}}</tool_call>"
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
]


def _run(check, script=None, template=None, settings=None, **options):
    async def main():
        tokenizer = None if template is None else _tokenizer(template)
        client = FakeEngineClient(script, tokenizer=tokenizer, **options)
        async with serving(client, **settings or {}) as http:
            return await check(http, client)

    return asyncio.run(main())


def _tokenizer(template):
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    source = None if template == "none" else template
    return Tokenizer((TINY / "tokenizer.json").read_text(), config, source)


async def _chat(http, **body):
    reply = await http.post(URL, json={"messages": MESSAGES, "max_tokens": 40} | body)
    assert reply.status_code == 200, reply.text
    found = strict_json(reply.content)
    check_schema("CreateChatCompletionResponse", found)
    return found


def _prompt(client):
    return client.requests[-1].prompt_token_ids


def test_reply_is_what_openai_describes():
    async def check(http, client):
        body = await _chat(http, n=2, temperature=0)
        assert [one["index"] for one in body["choices"]] == [0, 1]
        for one in body["choices"]:
            assert one["message"] == {"role": "assistant", "content": "hello", "refusal": None}
            assert one["finish_reason"] == "stop"
        assert body["id"].startswith("chatcmpl-")
        assert body["object"] == "chat.completion"

    _run(check, "hello")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3, "seed": 5},
        {"logprobs": True, "top_logprobs": 3},
        {"logprobs": True, "stop": ["l"], "n": 2},
        {"return_token_ids": True, "prompt_logprobs": 1},
        {"max_tokens": 3, "logprobs": True},
    ],
)
def test_stream_and_whole_are_equal(more):
    async def check(http, client):
        whole = await _chat(http, **more)
        client.engine.scheduler.kv.clear_cache()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"messages": MESSAGES, "max_tokens": 40} | more | options
        events = events_of(await http.post(URL, json=body))
        assert events[-1]["usage"] == whole["usage"]
        for streamed, choice in zip(joined_chat(events), whole["choices"], strict=True):
            assert (streamed["message"]["content"] or "") == choice["message"]["content"]
            assert streamed["finish_reason"] == choice["finish_reason"]
            assert streamed["stop_reason"] == choice["stop_reason"]
            assert streamed["entries"] == (choice["logprobs"] or {"content": []})["content"]
        for name in ("prompt_token_ids", "prompt_logprobs"):
            assert events[0].get(name) == whole.get(name)
            assert (name in whole) == ("return_token_ids" in more)
            assert not any(name in event for event in events[1:])
        if "return_token_ids" in more:
            ids = [i for event in events for c in event["choices"] for i in c.get("token_ids", [])]
            assert ids == whole["choices"][0]["token_ids"]

    _run(check, "hello Olá 🙂 end")


def test_c38_parts_of_text_are_joined_for_every_role():
    async def check(http, client):
        for role in ("system", "user", "assistant", "developer", "tool"):
            prompts = []
            for content in (
                "one two",
                [{"type": "text", "text": "one two"}],
                [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}],
            ):
                message = {"role": role, "content": content, "name": None, "tool_calls": []}
                await _chat(http, messages=[message, *MESSAGES])
                prompts.append(_prompt(client))
            assert prompts[0] == prompts[1] == prompts[2]
        image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        reply = await http.post(URL, json={"messages": [{"role": "user", "content": image}]})
        assert reply.status_code == 400
        assert error_of(reply)["param"] == "messages"

    _run(check)


def test_c38_null_is_absent():
    async def check(http, client):
        plain = await _chat(http, seed=None)
        same = await _chat(
            http, **{name: None for name in FIELDS if name not in ("messages", "max_tokens")}
        )
        assert same["choices"] == plain["choices"]
        first, second = client.requests
        assert first.sampling_params == second.sampling_params
        reply = await http.post(URL, json={"messages": MESSAGES, "max_tokens": None, "n": 1})
        assert reply.status_code == 200

    _run(check, "hello")


def test_c38_the_newer_name_of_max_tokens_wins():
    async def check(http, client):
        for fields, wanted in (
            ({"max_tokens": 3}, 3),
            ({"max_completion_tokens": 4, "max_tokens": None}, 4),
            ({"max_completion_tokens": 5, "max_tokens": 3}, 5),
            ({"max_completion_tokens": None, "max_tokens": 3}, 3),
        ):
            body = await _chat(http, **fields)
            assert body["usage"]["completion_tokens"] == wanted
            assert body["choices"][0]["finish_reason"] == "length"

    _run(check)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"functions": []}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        (
            {"chat_template_kwargs": {"enable_thinking": [1]}},
            "chat_template_kwargs.enable_thinking",
        ),
        (
            {"chat_template_kwargs": {"date_string": "x" * 257}},
            "chat_template_kwargs.date_string",
        ),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"max_completion_tokens": -1}, "max_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": "f"}, "tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"prompt": 5, "stop": ""}, "stop"),
    ],
)
def test_what_is_wrong_is_named(fields, param):
    async def check(http, client):
        reply = await http.post(URL, json={"messages": MESSAGES} | fields)
        assert reply.status_code == 400, reply.text
        assert error_of(reply)["param"] == param

    _run(check)


def test_c37_a_template_that_refuses_is_the_clients_error():
    async def check(http, client):
        for messages, words in (
            ([{"role": "system", "content": "be kind"}], "System role not supported"),
            (MESSAGES * 2, "roles must alternate"),
        ):
            reply = await http.post(URL, json={"messages": messages})
            assert reply.status_code == 400
            assert words in error_of(reply)["message"]
        history = {"role": "assistant", "content": None, "tool_calls": [], "refusal": None}
        await _chat(http, messages=[*MESSAGES, history, *MESSAGES])

    _run(check, template=STRICT_TEMPLATE)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0].nothing.at_all }}", "messages were refused"),
        ("{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}", ""),
        ("{{ messages.__class__.__mro__ }}", ""),
        ("none", "no chat template"),
    ],
)
def test_c37_templates_that_misbehave(template, words):
    async def check(http, client):
        reply = await http.post(URL, json={"messages": MESSAGES})
        assert reply.status_code == 400
        assert words in error_of(reply)["message"]
        assert not client.requests
        reply = await http.post("/v1/completions", json={"prompt": "hi"})
        assert reply.status_code == 200

    _run(check, template=template)


def test_templates_are_told_what_the_body_says():
    async def check(http, client):
        await _chat(http, chat_template_kwargs={"enable_thinking": True})
        assert "think" in client.tokenizer.decode(_prompt(client))
        await _chat(http, chat_template_kwargs={"enable_thinking": None})
        assert "think" not in client.tokenizer.decode(_prompt(client))

    _run(check, template=TOOLS_TEMPLATE)


def test_the_last_message_is_continued():
    async def check(http, client):
        begun = {"role": "assistant", "content": "Once upon"}

        def shown():
            return client.tokenizer.decode(_prompt(client), skip_special_tokens=False)

        await _chat(http, messages=[*MESSAGES, begun], continue_final_message=True)
        assert shown().endswith("assistant\nOnce upon")
        await _chat(http, messages=[*MESSAGES, begun], add_generation_prompt=False)
        assert shown().endswith("Once upon<|im_end|>\n")
        await _chat(http, messages=[*MESSAGES, begun])
        assert shown().endswith("<|im_start|>assistant\n")

    _run(check)


def test_structured_replies():
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }

    async def check(http, client):
        described = {"name": "one", "strict": True, "schema": schema}
        for fields in (
            {"response_format": {"type": "json_schema", "json_schema": described}},
            {"structured_outputs": {"json": schema, "regex": None}},
        ):
            body = await _chat(http, **fields)
            assert json.loads(body["choices"][0]["message"]["content"]) in ({"a": 1}, {"a": 2})
        body = await _chat(http, response_format={"type": "json_object"}, max_tokens=100)
        assert isinstance(json.loads(body["choices"][0]["message"]["content"]), dict)
        body = await _chat(http, response_format={"type": "text"})
        assert body["choices"][0]["message"]["content"] == '{"a": 1}'

    _run(check, '{"a": 1}')


CALLS = (
    'so <tool_call>\n{"name": "f", "arguments": {"x": ["Olá", {"y": "a\\"b"}]}}\n</tool_call>\n'
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
)


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"parallel_tool_calls": False}])
@pytest.mark.parametrize("text", [CALLS, "no call", '<tool_call>{"name": "f", "argum'])
def test_c39_tool_calls_streamed_and_whole(text, more):
    async def check(http, client):
        body = {"tools": TOOLS, "max_tokens": 300} | more
        whole = await _chat(http, **body)
        choice = whole["choices"][0]
        message = choice["message"]
        reply = await http.post(URL, json={"messages": MESSAGES, "stream": True} | body)
        events = events_of(reply)
        for event in events:
            check_schema("CreateChatCompletionStreamResponse", event)
        (streamed,) = joined_chat(events)
        assert streamed["message"]["content"] == message["content"]
        assert streamed["finish_reason"] == choice["finish_reason"]
        calls = [one["function"] for one in message.get("tool_calls", [])]
        found = streamed["message"].get("tool_calls", [])
        assert [{"name": o["name"], "arguments": o["arguments"]} for o in found] == calls
        assert len({one["id"] for one in found}) == len(found)
        if more.get("logprobs"):
            assert streamed["entries"] == choice["logprobs"]["content"]
        if text is not CALLS:
            assert choice["finish_reason"] == "stop"
            assert message["content"] == text
            return
        assert choice["finish_reason"] == "tool_calls"
        arguments = [json.loads(one["arguments"]) for one in calls]
        assert arguments == [{"x": ["Olá", {"y": 'a"b'}]}, {}][: len(arguments)]
        assert len(arguments) == (1 if "parallel_tool_calls" in more else 2)
        assert message["content"].strip() == "so"

    _run(check, text, template=TOOLS_TEMPLATE)


def test_a_call_that_is_forced():
    parameters = {
        "type": "object",
        "properties": {"x": {"enum": [1, 2]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]

    async def check(http, client):
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            body = await _chat(http, tools=tools, tool_choice=choice, max_tokens=300)
            message = body["choices"][0]["message"]
            assert [one["function"]["name"] for one in message["tool_calls"]] == ["f"]
            assert message["content"] is None
            assert body["choices"][0]["finish_reason"] == "tool_calls"

    _run(check, "I will not", template=TOOLS_TEMPLATE)
