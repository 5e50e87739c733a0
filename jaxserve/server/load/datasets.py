"""What is sent: requests of a JSON-lines file, or drawn with given lengths.

Used by `cli/load_flags.py`. Pure but for `vocabulary` and `as_texts`, which ask the server's own tokenizer,
so that no tokenizer is needed here. Source: the datasets random and prefix_repetition of `vllm bench serve`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.errors import JaxserveError
from jaxserve.server.load.client import LoadClient, ServerError
from jaxserve.server.load.records import LoadRequest

_NOT_SENT = ("id", "model", "stream", "stream_options")  # fields of a line that the load decides
# Its token ids are what random prompts are drawn from: ordinary ones, with no special token among them.
_SOURCE_TEXT = (
    "about after again air all along also always animal another answer any apple area around "
    "asked away back ball bank base be because bed been before began being below best better "
    "between big bird black blue board boat body book both bottom box boy bring brought brown "
    "build busy but call came can car carry cat cause center change check city class clear "
    "close cold color come common complete could country course cover cross dark day decide "
    "deep did different do does dog done door down draw dry during each early earth ease eat "
    "end enough even every example eye face fact fall family far farm fast father feel feet "
    "few field figure fill"
)


class DatasetError(JaxserveError):
    """A dataset that cannot be sent."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of drawn requests, in tokens.

    Args:
        input_len: of the part of a prompt that is its own.
        output_len: of an output.
        range_ratio: both vary uniformly by this share, in [0, 1).
        prefix_len: of the part that prompts share.
        num_prefixes: how many such parts there are; prompts take turns.
    """

    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1


def drawn_prompts(
    rng: np.random.Generator, num_prompts: int, lengths: Lengths, token_ids: Sequence[int]
) -> list[tuple[list[int], int]]:
    """Prompts of random tokens, each with the length of its output; shuffled, so that those with one prefix
    do not come in turns.

    Args:
        rng: where the draws come from.
        num_prompts: how many.
        lengths: how long.
        token_ids: what prompts are made of.
    """
    source = np.asarray(token_ids)
    prefixes = rng.choice(source, (lengths.num_prefixes, lengths.prefix_len))
    inputs = _around(rng, lengths.input_len, lengths.range_ratio, num_prompts)
    outputs = _around(rng, lengths.output_len, lengths.range_ratio, num_prompts)
    prompts = [
        (
            [*prefixes[i % lengths.num_prefixes].tolist(), *rng.choice(source, inputs[i]).tolist()],
            int(outputs[i]),
        )
        for i in range(num_prompts)
    ]
    return [prompts[i] for i in rng.permutation(num_prompts)]


def _around(rng: np.random.Generator, length: int, ratio: float, count: int) -> np.ndarray:
    """Integers, uniform in [length * (1 - ratio), length * (1 + ratio)], at least 1."""
    least = max(1, int(np.floor(length * (1 - ratio))))
    most = max(least, int(np.ceil(length * (1 + ratio))))
    return rng.integers(least, most, count, endpoint=True)


def drawn_requests(
    prompts: Iterable[tuple[list[int] | str, int]], *, is_chat: bool, ignore_eos: bool = True
) -> list[LoadRequest]:
    """Greedy requests of drawn prompts.

    Args:
        prompts: token ids or a text each, and the length of the output.
        is_chat: each is what a user says; then it must be a text.
        ignore_eos: outputs have exactly that length. A field of this project's server and vLLM's.
    """
    requests = []
    for prompt, output_len in prompts:
        body: dict[str, Any] = {"max_tokens": output_len, "temperature": 0}
        if ignore_eos:
            body["ignore_eos"] = True
        body |= {"messages": _says(prompt)} if is_chat else {"prompt": prompt}
        known = None if is_chat or isinstance(prompt, str) else len(prompt)
        requests.append(LoadRequest(body=body, num_prompt_tokens=known))
    return requests


def file_requests(
    lines: Iterable[bytes], *, is_chat: bool, defaults: Mapping[str, Any] | None = None
) -> list[LoadRequest]:
    """The requests of a file.

    Args:
        lines: JSON objects as `jaxserve run` takes them: prompt, prompt_token_ids or messages, and other
            fields of the API, which are sent as they are.
        is_chat: a prompt is what a user says.
        defaults: fields for lines that do not have them.

    Raises:
        DatasetError: a line is at fault, or there is none.
    """
    requests = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                requests.append(_line_request(line, is_chat, defaults or {}))
            except DatasetError as error:
                raise DatasetError(f"line {number}: {error}") from None
    if not requests:
        raise DatasetError("it holds no requests")
    return requests


def _line_request(line: bytes, is_chat: bool, defaults: Mapping[str, Any]) -> LoadRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise DatasetError("not JSON") from None
    if not isinstance(fields, dict):
        raise DatasetError("not a JSON object")
    body = {**defaults, **{name: x for name, x in fields.items() if name not in _NOT_SENT}}
    ids, text, messages = (
        body.pop(name, None) for name in ("prompt_token_ids", "prompt", "messages")
    )
    if ids is None and isinstance(text, list):
        ids, text = text, None
    if is_chat:
        if messages is None and not isinstance(text, str):
            raise DatasetError("a chat needs messages, or a prompt that is text")
        return LoadRequest(body=body | {"messages": messages or _says(text)})
    if ids is None and not isinstance(text, str):
        raise DatasetError("needs a prompt, text or token ids; messages need --backend=openai-chat")
    known = len(ids) if isinstance(ids, list) else None
    return LoadRequest(
        body=body | {"prompt": text if ids is None else ids}, num_prompt_tokens=known
    )


def _says(prompt: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": prompt}]


def repeated(requests: Sequence[LoadRequest], num_prompts: int | None) -> list[LoadRequest]:
    """As many requests as asked for: the first ones, or all of them again and again; None = each once."""
    wanted = len(requests) if num_prompts is None else num_prompts
    return [requests[i % len(requests)] for i in range(wanted)]


async def vocabulary(client: LoadClient) -> list[int]:
    """Token ids of ordinary words, by the server's tokenizer.

    Raises:
        DatasetError: it has no /tokenize.
    """
    body = {"model": client.model, "prompt": _SOURCE_TEXT, "add_special_tokens": False}
    try:
        answer = await client.get_json("POST", "/tokenize", body)
        return sorted({int(i) for i in answer["tokens"]})
    except (ServerError, LookupError, TypeError, ValueError) as error:
        raise DatasetError(
            f"random prompts need the server's /tokenize ({error}); use --dataset=jsonl"
        ) from None


async def as_texts(
    client: LoadClient, prompts: Iterable[tuple[list[int], int]]
) -> list[tuple[str, int]]:
    """Prompts as texts, by the server's tokenizer. Read back, a text may have a few tokens more or fewer.

    Raises:
        DatasetError: it has no /detokenize.
    """
    texts = []
    try:
        for ids, output_len in prompts:
            body = {"model": client.model, "tokens": ids}
            answer = await client.get_json("POST", "/detokenize", body)
            texts.append((str(answer["prompt"]), output_len))
    except (ServerError, LookupError, TypeError) as error:
        raise DatasetError(
            f"chats of random tokens need the server's /detokenize ({error}); use --dataset=jsonl"
        ) from None
    return texts
