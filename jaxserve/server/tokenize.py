"""/tokenize, /detokenize, /tokenizer_info: texts and conversations as token ids, and back, as completions
see them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve.errors import InvalidRequestError, shown
from jaxserve.field_checks import checked_token_ids
from jaxserve.server.openai import chat, sse
from jaxserve.server.openai.endpoint import what_is_served
from jaxserve.server.openai.fields import (
    BOOLEAN,
    STRING,
    TOKEN_ID,
    Field,
    UnknownFields,
    read_fields,
    table,
)
from jaxserve.server.openai.logprobs import TokenNames
from jaxserve.server.state import ServerState

#: Characters, or eight times the context: while it is encoded, each takes a hundred bytes and more.
MAX_TOKENIZED = 2**20
MAX_DETOKENIZED = 2**17  # tokens, or as many as the context: each may be a text of many characters
#: What is taken from a chat body, and read as /v1/chat/completions reads it.
_CHAT_NAMES = (
    "model",
    "messages",
    "tools",
    "tool_choice",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)
FIELDS = table(
    Field(name="prompt", schema=STRING, doc="The text; instead of messages."),
    *(chat.FIELDS[name] for name in _CHAT_NAMES),
    Field(
        name="add_special_tokens",
        schema=BOOLEAN,
        doc="Let the tokenizer add its own (a BOS, usually); true unless messages are given.",
    ),
    Field(name="return_token_strs", schema=BOOLEAN, doc="Give the text of each token too."),
)
DETOKENIZE_FIELDS = table(
    chat.FIELDS["model"],
    Field(
        name="tokens",
        schema={"type": "array", "items": TOKEN_ID},
        doc="Token ids.",
        required=True,
    ),
)


def routes(state: ServerState) -> list[Route]:
    """The routes of this module."""
    unknown = UnknownFields()

    async def tokenize(request: Request) -> Response:
        body = await state.body(request)
        return _reply(await state.side_encoder.run(_encoded, tokenized, state, body, unknown))

    async def detokenize(request: Request) -> Response:
        body = await state.body(request)
        return _reply(await state.side_encoder.run(_encoded, detokenized, state, body, unknown))

    async def tokenizer_info(_: Request) -> Response:
        return JSONResponse(told_of_tokenizer(state))

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
    ]


def _encoded(
    answer: Callable[[ServerState, Mapping[str, Any], UnknownFields], dict[str, Any]],
    state: ServerState,
    body: Mapping[str, Any],
    unknown: UnknownFields,
) -> bytes:
    """In a thread: a reply may have millions of tokens."""
    return sse.encode(answer(state, body, unknown))


def _reply(data: bytes) -> Response:
    return Response(data, media_type="application/json")


def told_of_tokenizer(state: ServerState) -> dict[str, Any]:
    """The reply of /tokenizer_info: what lm-eval and others need to tokenize here instead of themselves.

    Raises:
        InvalidRequestError: the checkpoint has no tokenizer.
    """
    tokenizer = state.tokenizer
    return {
        **tokenizer.special_tokens,
        "chat_template": tokenizer.chat_template,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": state.model.max_model_len,
    }


def tokenized(
    state: ServerState, body: Mapping[str, Any], unknown: UnknownFields
) -> dict[str, Any]:
    """The reply of /tokenize.

    Raises:
        InvalidRequestError: a field is at fault.
        ApiError: no such model.
    """
    fields = read_fields(body, FIELDS, unknown)
    state.check_model(fields.get("model"))
    if ("prompt" in fields) == ("messages" in fields):
        raise InvalidRequestError(
            "exactly one of prompt and messages must be given", param="prompt"
        )
    if "prompt" in fields:
        most = max(MAX_TOKENIZED, 8 * state.model.max_model_len)
        if len(fields["prompt"]) > most:
            raise InvalidRequestError(
                f"prompt must have {most} characters or fewer, got {len(fields['prompt'])}",
                param="prompt",
            )
        adds_specials = fields.get("add_special_tokens", True)
        ids = state.tokenizer.encode(fields["prompt"], adds_specials)
    else:
        ids = _encode_chat(state, fields, unknown)
    reply: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": state.model.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if fields.get("return_token_strs", False):
        reply["token_strs"] = [*map(TokenNames(state.tokenizer).name, ids)]
    return reply


def _encode_chat(
    state: ServerState, fields: Mapping[str, Any], unknown: UnknownFields
) -> list[int]:
    if fields.get("add_special_tokens", False):
        raise InvalidRequestError(
            "add_special_tokens cannot be true for messages: the chat template writes them",
            param="add_special_tokens",
        )
    body = {name: fields[name] for name in _CHAT_NAMES if name in fields}
    return chat.parse(body, what_is_served(state, unknown)).encode()[0]


def detokenized(
    state: ServerState, body: Mapping[str, Any], unknown: UnknownFields
) -> dict[str, Any]:
    """The reply of /detokenize.

    Raises:
        InvalidRequestError: a field is at fault.
        ApiError: no such model.
    """
    fields = read_fields(body, DETOKENIZE_FIELDS, unknown)
    state.check_model(fields.get("model"))
    if "tokens" not in fields:
        raise InvalidRequestError("tokens are needed", param="tokens")
    most = max(MAX_DETOKENIZED, state.model.max_model_len)
    ids = checked_token_ids("tokens", fields["tokens"], most=most)
    largest = max(ids, default=0)
    if largest >= state.model.vocab_size:
        raise InvalidRequestError(
            f"tokens must be below the vocabulary's size, {state.model.vocab_size}, got {shown(largest)}",
            param="tokens",
        )
    return {"prompt": state.tokenizer.decode(ids, skip_special_tokens=False)}
