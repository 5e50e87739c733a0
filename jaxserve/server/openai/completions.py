"""/v1/completions: prompts as text or ids; what a body asks for, and the reply to it.

Invariant: choice i of prompt p has the index p * n + i, streamed or not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.routing import Route

from jaxserve.errors import InvalidRequestError
from jaxserve.field_checks import MAX_TOKEN_ID, is_int, require, require_within
from jaxserve.request import RequestOutput
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.server.openai.call import Call, Served, common_fields
from jaxserve.server.openai.choices import CompletionChoice, PromptPart
from jaxserve.server.openai.endpoint import Endpoint
from jaxserve.server.openai.fields import (
    BOOLEAN,
    COMMON_FIELDS,
    STRING,
    TOKEN_ID,
    Field,
    make_sampling_params,
    read_fields,
    table,
)
from jaxserve.server.openai.reply import CommonReply
from jaxserve.server.openai.response_format import structured_outputs_of
from jaxserve.server.state import ServerState

URL = "/v1/completions"
KIND = "text_completion"
MAX_PROMPTS = 2048
DEFAULT_MAX_TOKENS = 16  # OpenAI's, where the checkpoint recommends no other
_IDS = {"type": "array", "minItems": 1, "items": TOKEN_ID}
_TEXT = {"type": "string", "minLength": 1}

FIELDS = table(
    *COMMON_FIELDS,
    Field(
        name="prompt",
        schema={
            "anyOf": [
                _TEXT,
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TEXT},
                _IDS,
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _IDS},
            ]
        },
        doc="A text, a list of texts, a list of token ids, or a list of these.",
        required=True,
    ),
    Field(name="echo", schema=BOOLEAN, doc="Begin the text with the prompt."),
    Field(
        name="logprobs",
        schema={"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
        doc="Give log probabilities, also of so many likeliest tokens; 0 = of the chosen ones alone.",
    ),
    Field(
        name="best_of",
        schema={"type": "integer"},
        doc="Only equal to n: choices are not ranked here.",
    ),
    Field(name="suffix", schema=STRING, doc="Only empty: no text is inserted here."),
)


@dataclass(frozen=True, kw_only=True)
class CompletionCall(Call):
    """A body of this endpoint.

    Args:
        prompts: texts or token ids.
        echo: whether the text begins with the prompt.
        says_prompt_logprobs: whether `prompt_logprobs` are given apart from echo.
    """

    prompts: Sequence[str | list[int]]
    echo: bool
    says_prompt_logprobs: bool

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def tells_of_prompt(self) -> bool:
        return self.echo or self.return_token_ids

    def encode(self) -> list[list[int]]:
        return [self._encoded(number, one) for number, one in enumerate(self.prompts)]

    def _encoded(self, number: int, prompt: str | list[int]) -> list[int]:
        where = "prompt" if len(self.prompts) == 1 else f"prompt[{number}]"
        given = prompt
        if isinstance(prompt, str):
            tokenizer = self.served.model.tokenizer
            if tokenizer is None:
                raise InvalidRequestError(
                    "this checkpoint has no tokenizer: give prompt as token ids", param="prompt"
                )
            most = self.served.model.max_model_len
            prompt = tokenizer.encode(prompt, most=most)
        require(len(prompt) > 0, where, given, "of at least one token")
        return prompt

    def reply(self, prompts: Sequence[Sequence[int]]) -> "CompletionReply":
        return CompletionReply(self, prompts)


def parse(body: Mapping[str, Any], served: Served) -> CompletionCall:
    """What a body asks for.

    Raises:
        InvalidRequestError: a field is at fault; `param` names it.
        ApiError: there is no such model.
    """
    fields = read_fields(body, FIELDS, served.unknown)
    common = common_fields(fields, served, "cmpl")
    num_logprobs = fields.get("logprobs")
    if num_logprobs is not None:
        require_within("logprobs", num_logprobs, 0, MAX_LOGPROBS)
    echo = fields.get("echo", False)
    more: dict[str, Any] = {"logprobs": num_logprobs}
    more["structured_outputs"] = structured_outputs_of(fields)
    if echo and num_logprobs is not None:
        asked = fields.get("prompt_logprobs")
        more["prompt_logprobs"] = max(num_logprobs, asked if is_int(asked) else 0)
    default = served.model.default_sampling_params
    if "max_tokens" not in fields and default.max_tokens is None:
        more["max_tokens"] = DEFAULT_MAX_TOKENS
    params = make_sampling_params(fields, default, **more)
    _check_unserved(fields, params.n)
    return CompletionCall(
        **common,
        params=params,
        prompts=_prompts(fields.get("prompt")),
        echo=echo,
        num_logprobs=num_logprobs,
        says_prompt_logprobs="prompt_logprobs" in fields,
    )


def _check_unserved(fields: Mapping[str, Any], n: int) -> None:
    best_of = fields.get("best_of", n)
    require(best_of == n, "best_of", best_of, f"equal to n ({n}): choices are not ranked here")
    suffix = fields.get("suffix", "")
    require(suffix == "", "suffix", suffix, "absent or empty: no text is inserted here")


def _prompts(value: object) -> list[str | list[int]]:
    what = "a text, a list of texts, a list of token ids, or a list of these"
    if isinstance(value, str):
        return [value]
    require(isinstance(value, list) and len(value) > 0, "prompt", value, f"{what}, not empty")
    several: list[Any] = value  # type: ignore[assignment]
    if is_int(several[0]):
        return [_ids("prompt", several)]
    most = f"{MAX_PROMPTS} prompts or fewer"
    require(len(several) <= MAX_PROMPTS, "prompt", len(several), most)
    if all(isinstance(one, str) for one in several):
        return several
    require(all(isinstance(one, list) for one in several), "prompt", value, what)
    return [_ids(f"prompt[{number}]", one) for number, one in enumerate(several)]


def _ids(where: str, value: list[Any]) -> list[int]:
    for one in value:
        if not is_int(one) or not 0 <= one <= MAX_TOKEN_ID:
            require(False, where, one, "a list of token ids (integers >= 0)")
    return value


class CompletionReply(CommonReply[CompletionChoice]):
    """The answer to a `CompletionCall`; see `Reply`."""

    def __init__(self, call: CompletionCall, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(call, KIND)
        self._call = call
        self._prompts = prompts
        self._texts = [self._prompt_text(prompt) if call.echo else None for prompt in prompts]

    def _new_choice(self, index: int) -> CompletionChoice:
        return CompletionChoice(index, self._options)

    def _prompt_text(self, prompt: Sequence[int]) -> str:
        tokenizer = self._call.served.model.tokenizer
        if tokenizer is None:
            return ""
        return tokenizer.decode(prompt, self._call.params.skip_special_tokens)

    def chunks(self, prompt: int, output: RequestOutput) -> bytes:
        usage = self._count(prompt, output)
        choices = self._fed(prompt, output)
        return b"".join([self._writer.chunk(choice, usage) for choice in choices])

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for prompt, output in enumerate(outputs):
            self._count(prompt, output)
            choices += self._fed(prompt, output)
        return {**self._call.head(KIND), "choices": choices, "usage": self._usage.body()}

    def _fed(self, prompt: int, output: RequestOutput) -> list[dict[str, Any]]:
        part = PromptPart(
            token_ids=self._prompts[prompt],
            text=self._texts[prompt],
            logprobs=output.prompt_logprobs,
            says_logprobs=self._call.says_prompt_logprobs,
        )
        first = prompt * self._call.params.n
        return [self._choice(first + one.index).feed(one, part) for one in output.outputs]


def routes(state: ServerState) -> list[Route]:
    """The routes of this module."""
    return [Route(URL, Endpoint(state, parse), methods=["POST"])]
