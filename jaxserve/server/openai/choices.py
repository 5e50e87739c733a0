"""From what the engine releases of a choice to OpenAI's objects: `CompletionChoice`, `ChatChoice`.

One per choice of a reply, made by `replies`. A reply that is not streamed feeds a whole output to the
same objects, so it cannot differ from the joined stream.
Invariant: `finish_reason` stands in the last object of a choice and nowhere else; the first one of a chat
choice says the role.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.request import CompletionOutput, PromptLogprob
from jaxserve.server.openai.logprobs import (
    TokenEntry,
    TokenNames,
    TokenReader,
    chat_layout,
    completion_layout,
    prompt_entries,
    prompt_layout,
)
from jaxserve.server.tools.parser import ContentDelta, ToolCallDelta, ToolParser


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions:
    """What a reply is to tell of its choices.

    Args:
        names: of tokens.
        num_logprobs: likeliest tokens per token; 0 = the token's own alone, None = no logprobs.
        skip_special_tokens: whether texts are without special tokens.
        return_token_ids: give the ids too.
    """

    names: TokenNames
    num_logprobs: int | None
    skip_special_tokens: bool
    return_token_ids: bool

    def reader(self, start: int = 0) -> TokenReader | None:
        """What gives the entries of an output's tokens; None without logprobs."""
        if self.num_logprobs is None:
            return None
        return TokenReader(self.names, skip_special_tokens=self.skip_special_tokens, start=start)


@dataclass(frozen=True, kw_only=True)
class PromptPart:
    """What a choice tells of its prompt.

    Args:
        token_ids: the prompt.
        text: of it, where the choice begins with it; None = it does not.
        logprobs: of the prompt's tokens, if they were asked for.
        says_logprobs: whether `prompt_logprobs` was asked for, and not only echo with logprobs.
    """

    token_ids: Sequence[int]
    text: str | None
    logprobs: Sequence[PromptLogprob | None] | None
    says_logprobs: bool


class CompletionChoice:
    """A choice of /v1/completions.

    Args:
        index: in the reply.
        options: of the reply.
    """

    def __init__(self, index: int, options: ChoiceOptions) -> None:
        self._index = index
        self._options = options
        self._reader: TokenReader | None = None
        self._is_begun = False

    def feed(self, output: CompletionOutput, prompt: PromptPart) -> dict[str, Any]:
        """The object of what is new.

        Args:
            output: new text and ids.
            prompt: what it answers; told with the first object.
        """
        options = self._options
        text, entries = output.text, []
        more: dict[str, Any] = {"token_ids": output.token_ids} if options.return_token_ids else {}
        if not self._is_begun:
            self._is_begun = True
            self._reader = options.reader(len(prompt.text or ""))
            if prompt.text is not None:
                text = prompt.text + text
                entries = self._prompt_entries(prompt)
            more |= told_of_prompt(prompt, options)
        if self._reader is not None:
            entries += self._reader.feed_output(output)
        choice: dict[str, Any] = {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs(entries, is_last=output.finish_reason is not None),
            "finish_reason": output.finish_reason,
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        return {**choice, **more} if more else choice

    def _prompt_entries(self, prompt: PromptPart) -> list[TokenEntry]:
        options = self._options
        if options.num_logprobs is None or prompt.logprobs is None:
            return []
        return prompt_entries(
            prompt.token_ids,
            prompt.text or "",
            prompt.logprobs,
            options.names,
            skip_special_tokens=options.skip_special_tokens,
        )

    def _logprobs(self, entries: Sequence[TokenEntry], *, is_last: bool) -> dict[str, Any] | None:
        num_top = self._options.num_logprobs
        if num_top is None or not (entries or is_last):
            return None
        return completion_layout(entries, self._options.names, num_top)


def told_of_prompt(prompt: PromptPart, options: ChoiceOptions) -> dict[str, Any]:
    """The fields that a reply has of its prompt, where they were asked for."""
    found: dict[str, Any] = {}
    if prompt.says_logprobs and prompt.logprobs is not None:
        found["prompt_logprobs"] = prompt_layout(prompt.logprobs, prompt.token_ids, options.names)
    if options.return_token_ids:
        found["prompt_token_ids"] = list(prompt.token_ids)
    return found


class ChatChoice:
    """A choice of /v1/chat/completions, as the objects of a stream.

    Args:
        index: in the reply.
        options: of the reply.
        parser: finds tool calls in the text; None = all of it is content.
    """

    def __init__(self, index: int, options: ChoiceOptions, parser: ToolParser | None) -> None:
        self._index = index
        self._options = options
        self._parser = parser
        self._reader = options.reader()
        self._is_begun = False
        self._has_calls = False
        self._entries: list[TokenEntry] = []  # of text that the parser holds back
        self._token_ids: list[int] = []

    def feed(self, output: CompletionOutput) -> list[dict[str, Any]]:
        """The objects of what is new; none while the parser holds everything back."""
        is_last = output.finish_reason is not None
        if self._reader is not None:
            self._entries += self._reader.feed_output(output)
        if self._options.return_token_ids:
            self._token_ids += output.token_ids
        events = [] if self._is_begun else [self._event({"role": "assistant", "content": ""})]
        self._is_begun = True
        deltas = [self._event(delta) for delta in self._deltas(output.text, is_last=is_last)]
        if is_last and not deltas:
            deltas = [self._event({})]
        if deltas:
            self._complete(deltas[-1], output)
        return events + deltas

    def _event(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _deltas(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        if self._parser is None:
            return [{"content": text}] if text else []
        found = self._parser.feed(text) if text else []
        if is_last:
            found = [*found, *self._parser.finish()]
        self._has_calls |= any(isinstance(one, ToolCallDelta) for one in found)
        return [_delta(one) for one in found]

    def _complete(self, event: dict[str, Any], output: CompletionOutput) -> None:
        """Adds to the last object of a piece what belongs to the piece as a whole."""
        num_top = self._options.num_logprobs
        if num_top is not None and self._entries:
            content = chat_layout(self._entries, self._options.names, num_top)
            event["logprobs"] = {"content": content, "refusal": None}
            self._entries = []
        if self._options.return_token_ids:
            event["token_ids"], self._token_ids = self._token_ids, []
        reason = output.finish_reason
        if reason is not None:
            event["finish_reason"] = (
                "tool_calls" if reason == "stop" and self._has_calls else reason
            )
            event["stop_reason"] = output.stop_reason


def _delta(found: ContentDelta | ToolCallDelta) -> dict[str, Any]:
    if isinstance(found, ContentDelta):
        return {"content": found.text}
    function = {"arguments": found.arguments}
    if found.name is not None:
        function = {"name": found.name, **function}
    call: dict[str, Any] = {"index": found.index, "function": function}
    if found.id is not None:
        call = {"index": found.index, "id": found.id, "type": "function", "function": function}
    return {"tool_calls": [call]}


def whole_chat_choice(events: Iterable[dict[str, Any]], *, has_logprobs: bool) -> dict[str, Any]:
    """All objects of a chat choice as the one of a reply that is not streamed."""
    content: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    logprobs: list[dict[str, Any]] = []
    token_ids: list[int] = []
    last: dict[str, Any] = {}
    for last in events:
        delta = last["delta"]
        content.append(delta.get("content") or "")
        for part in delta.get("tool_calls", ()):
            _join_call(calls, part)
        logprobs += (last["logprobs"] or {}).get("content", ())
        token_ids += last.get("token_ids", ())
    text = "".join(content)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not text else text,
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    choice = {
        "index": last["index"],
        "message": message,
        "logprobs": {"content": logprobs, "refusal": None} if has_logprobs else None,
        "finish_reason": last["finish_reason"],
        "stop_reason": last["stop_reason"],
    }
    return {**choice, "token_ids": token_ids} if "token_ids" in last else choice


def _join_call(calls: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    call = calls.setdefault(
        part["index"], {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
    )
    call["id"] = call["id"] or part.get("id")
    call["function"]["name"] += part["function"].get("name", "")
    call["function"]["arguments"] += part["function"]["arguments"]
