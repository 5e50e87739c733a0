"""/v1/chat/completions: conversations through the chat template; what a body asks for, and the reply to it.

Of `max_tokens` and `max_completion_tokens` the second one, the newer, wins. Invariant: a choice's tool
calls come out of one parser, streamed or not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.routing import Route

from jaxserve.errors import InvalidRequestError, shown
from jaxserve.field_checks import require, require_within
from jaxserve.request import RequestOutput
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.server.openai.call import Call, Served, common_fields
from jaxserve.server.openai.choices import (
    ChatChoice,
    PromptPart,
    told_of_prompt,
    whole_chat_choice,
)
from jaxserve.server.openai.endpoint import Endpoint
from jaxserve.server.openai.fields import (
    BOOLEAN,
    COMMON_FIELDS,
    Field,
    ignored_fields,
    make_sampling_params,
    read_fields,
    refused_field,
    table,
)
from jaxserve.server.openai.reply import CommonReply
from jaxserve.server.openai.response_format import structured_outputs_of
from jaxserve.server.state import ServerState
from jaxserve.server.tools.choice import ToolPlan, plan_tools
from jaxserve.text.chat_template import MAX_TOOLS

URL = "/v1/chat/completions"
MAX_TEMPLATE_TEXT = 256  # characters of a text among chat_template_kwargs
#: What a body may tell a chat template: texts, numbers and booleans under these names alone.
TEMPLATE_NAMES = ("enable_thinking", "thinking", "reasoning_effort", "date_string")
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string"},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"]},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}
_TEMPLATE_VALUE = {
    "anyOf": [
        {"type": ["boolean", "number", "null"]},
        {"type": "string", "maxLength": MAX_TEMPLATE_TEXT},
    ]
}

FIELDS = table(
    *COMMON_FIELDS,
    Field(
        name="messages",
        schema={"type": "array", "items": _MESSAGE, "minItems": 1},
        doc="Objects with a role and a content: a text, or parts of the type text, which are joined.",
        required=True,
    ),
    Field(
        name="max_completion_tokens",
        schema={"type": "integer", "minimum": 0},
        doc="The newer name of max_tokens; it wins where both are given.",
    ),
    Field(name="logprobs", schema=BOOLEAN, doc="Give log probabilities of the output's tokens."),
    Field(
        name="top_logprobs",
        schema={"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
        doc="Also of so many likeliest tokens; needs logprobs.",
    ),
    Field(
        name="tools",
        schema={"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS},
        doc="Functions that the model may call.",
    ),
    Field(
        name="tool_choice",
        schema={"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]},
        doc="Whether a function is called, and which.",
    ),
    Field(name="parallel_tool_calls", schema=BOOLEAN, doc="false = one call at most."),
    Field(
        name="add_generation_prompt",
        schema=BOOLEAN,
        doc="End the prompt with the head of an assistant's message; true unless "
        "continue_final_message is.",
    ),
    Field(
        name="continue_final_message",
        schema=BOOLEAN,
        doc="Go on with the last message, which is the assistant's.",
    ),
    Field(
        name="chat_template_kwargs",
        schema={
            "type": "object",
            "properties": dict.fromkeys(TEMPLATE_NAMES, _TEMPLATE_VALUE),
            "additionalProperties": False,
        },
        doc=f"Values for the chat template; only {', '.join(TEMPLATE_NAMES)}.",
    ),
    refused_field("chat_template", "this server renders with its own template alone"),
    refused_field("functions", "it was replaced by tools, which are served"),
    refused_field("function_call", "it was replaced by tool_choice, which is served"),
    refused_field("audio", "only text is made here"),
    Field(
        name="modalities",
        schema={"type": "array", "items": {"const": "text"}},
        doc='Only ["text"].',
    ),
    *ignored_fields("reasoning_effort", "verbosity", "prediction"),
)


@dataclass(frozen=True, kw_only=True)
class ChatCall(Call):
    """A body of this endpoint.

    Args:
        messages: the conversation, as it came; the template checks it.
        tools: what its tools mean.
        add_generation_prompt, continue_final_message: as the fields of the body.
        template_values: more values for the template.
    """

    messages: Sequence[Any]
    tools: ToolPlan
    add_generation_prompt: bool
    continue_final_message: bool
    template_values: Mapping[str, Any]

    def encode(self) -> list[list[int]]:
        tokenizer = self.served.model.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "this checkpoint has no tokenizer: use /v1/completions with token ids",
                param="messages",
            )
        ids = tokenizer.encode_chat(
            self.messages,
            self.add_generation_prompt,
            tools=self.tools.tools_for_template,
            continue_final_message=self.continue_final_message,
            variables=self.template_values,
            most=self.served.model.max_model_len,
        )
        return [ids]

    def reply(self, prompts: Sequence[Sequence[int]]) -> "ChatReply":
        return ChatReply(self, prompts[0])


def parse(body: Mapping[str, Any], served: Served) -> ChatCall:
    """What a body asks for.

    Raises:
        InvalidRequestError: a field is at fault; `param` names it.
        ApiError: there is no such model.
    """
    fields = read_fields(body, FIELDS, served.unknown)
    common = common_fields(fields, served, "chatcmpl")
    if "messages" not in fields:
        raise InvalidRequestError("messages are needed", param="messages")
    _check_modalities(fields.get("modalities"))
    tools = plan_tools(
        fields.get("tools"),
        fields.get("tool_choice"),
        fields.get("parallel_tool_calls"),
        served.tool_parser,
        text_format=structured_outputs_of(fields),
    )
    continues = fields.get("continue_final_message", False)
    num_logprobs = _num_logprobs(fields)
    more: dict[str, Any] = {
        "logprobs": None if num_logprobs is None else num_logprobs or True,
        "structured_outputs": tools.structured_outputs,
    }
    if "max_completion_tokens" in fields:
        more["max_tokens"] = fields["max_completion_tokens"]
    if tools.parses and "skip_special_tokens" not in fields:
        more["skip_special_tokens"] = False  # the marks of a call may be special tokens
    return ChatCall(
        **common,
        params=make_sampling_params(fields, served.model.default_sampling_params, **more),
        messages=fields["messages"],
        tools=tools,
        add_generation_prompt=fields.get("add_generation_prompt", not continues),
        continue_final_message=continues,
        template_values=_template_values(fields.get("chat_template_kwargs", {})),
        num_logprobs=num_logprobs,
    )


def _check_modalities(value: object) -> None:
    require(value in (None, [], ["text"]), "modalities", value, '["text"]: only text is made here')


def _num_logprobs(fields: Mapping[str, Any]) -> int | None:
    num_top = fields.get("top_logprobs")
    if num_top is not None:
        require_within("top_logprobs", num_top, 0, MAX_LOGPROBS)
    if fields.get("logprobs", False):
        return num_top or 0
    if num_top is not None:
        raise InvalidRequestError(
            f"top_logprobs can only be given with logprobs: true, got {num_top}",
            param="top_logprobs",
        )
    return None


def _template_values(given: Mapping[str, Any]) -> dict[str, Any]:
    where = "chat_template_kwargs"
    for name, value in given.items():
        if name not in TEMPLATE_NAMES:
            raise InvalidRequestError(
                f"{where} may only have {', '.join(TEMPLATE_NAMES)}, got {shown(name)}", param=where
            )
        is_small = value is None or isinstance(value, bool | int | float)
        is_short = isinstance(value, str) and len(value) <= MAX_TEMPLATE_TEXT
        limit = f"a boolean, a number or a text of {MAX_TEMPLATE_TEXT} characters or fewer"
        require(is_small or is_short, f"{where}.{name}", value, limit)
    return {name: value for name, value in given.items() if value is not None}


class ChatReply(CommonReply[ChatChoice]):
    """The answer to a `ChatCall`; see `Reply`."""

    def __init__(self, call: ChatCall, prompt: Sequence[int]) -> None:
        super().__init__(call, "chat.completion.chunk")
        self._call = call
        self._prompt = prompt
        self._is_begun = False

    def _new_choice(self, index: int) -> ChatChoice:
        plan = self._call.tools
        return ChatChoice(index, self._options, plan.parser() if plan.parses else None)

    def chunks(self, prompt: int, output: RequestOutput) -> bytes:
        usage = self._count(prompt, output)
        events = [event for one in output.outputs for event in self._choice(one.index).feed(one)]
        chunks = []
        if events and not self._is_begun:
            self._is_begun = True
            chunks = [self._writer.chunk(events.pop(0), usage, self._told_of_prompt(output))]
        return b"".join(chunks + [self._writer.chunk(event, usage) for event in events])

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        self._count(0, output)
        has_logprobs = self._call.num_logprobs is not None
        choices = [
            whole_chat_choice(self._choice(one.index).feed(one), has_logprobs=has_logprobs)
            for one in output.outputs
        ]
        head = self._call.head("chat.completion")
        told = self._told_of_prompt(output)
        return {**head, "choices": choices, "usage": self._usage.body(), **told}

    def _told_of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        part = PromptPart(
            token_ids=self._prompt,
            text=None,
            logprobs=output.prompt_logprobs,
            says_logprobs=self._call.params.prompt_logprobs is not None,
        )
        return told_of_prompt(part, self._options)


def routes(state: ServerState) -> list[Route]:
    """The routes of this module."""
    return [Route(URL, Endpoint(state, parse), methods=["POST"])]
