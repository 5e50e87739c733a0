"""What a choice's objects are when a parser holds text back, and when several tokens come at once."""

from jaxserve.request import CompletionOutput
from jaxserve.server.openai.choices import (
    ChatChoice,
    ChoiceOptions,
    CompletionChoice,
    PromptPart,
    whole_chat_choice,
)
from jaxserve.server.openai.logprobs import TokenNames
from jaxserve.server.tools.parser import ContentDelta, ToolCallDelta

OPTIONS = ChoiceOptions(
    names=TokenNames(None), num_logprobs=0, skip_special_tokens=True, return_token_ids=True
)
PROMPT = PromptPart(token_ids=[1, 2], text=None, logprobs=None, says_logprobs=False)


def piece(token_id, text="", finish_reason=None):
    return CompletionOutput(0, text, [token_id], [-0.5], finish_reason)


class Holding:
    """A parser that gives nothing before the end."""

    def __init__(self, *deltas):
        self._deltas = deltas

    def feed(self, text):
        return []

    def finish(self):
        return list(self._deltas)


def test_logprobs_and_ids_of_held_text_come_with_what_it_becomes():
    call = ToolCallDelta(0, "call_1", "f", "{}")
    choice = ChatChoice(0, OPTIONS, Holding(ContentDelta("so "), call))
    first = choice.feed(piece(5, "so "))
    assert [event["delta"] for event in first] == [{"role": "assistant", "content": ""}]
    assert choice.feed(piece(6, "<call>")) == []
    content, called = choice.feed(piece(7, "", "stop"))
    assert content["delta"] == {"content": "so "}
    assert content["logprobs"] is None
    assert content["finish_reason"] is None
    (part,) = called["delta"]["tool_calls"]
    assert part == {
        "index": 0,
        "id": "call_1",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
    }
    assert called["finish_reason"] == "tool_calls"
    assert called["token_ids"] == [5, 6, 7]
    assert [one["token"] for one in called["logprobs"]["content"]] == [
        f"token_id:{i}" for i in (5, 6, 7)
    ]
    whole = whole_chat_choice([*first, content, called], has_logprobs=True)
    assert whole["message"]["content"] == "so "
    assert whole["message"]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ]
    assert whole["token_ids"] == [5, 6, 7]


def test_a_call_that_the_length_cut_off_is_no_finished_call():
    choice = ChatChoice(0, OPTIONS, Holding(ToolCallDelta(0, "call_1", "f", '{"a')))
    *_, last = choice.feed(piece(5, "x", "length"))
    assert last["finish_reason"] == "length"


def test_an_end_without_text_is_an_event_of_its_own():
    choice = ChatChoice(3, OPTIONS, None)
    choice.feed(piece(5, "a"))
    (last,) = choice.feed(piece(6, "", "stop"))
    assert last["delta"] == {}
    assert last["index"] == 3
    assert last["finish_reason"] == "stop"


def test_a_completion_says_its_prompt_once():
    choice = CompletionChoice(1, OPTIONS)
    first = choice.feed(piece(5, "a"), PROMPT)
    assert first["prompt_token_ids"] == [1, 2]
    assert first["finish_reason"] is None
    assert "stop_reason" not in first
    second = choice.feed(piece(6, "b", "length"), PROMPT)
    assert "prompt_token_ids" not in second
    assert second["stop_reason"] is None
    assert second["logprobs"]["tokens"] == ["token_id:6"]
