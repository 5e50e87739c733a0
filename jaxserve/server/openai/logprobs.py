"""Log probabilities of tokens in OpenAI's two layouts: lists side by side (completions), objects (chat).

Used by `choices` and for echoed prompts. `TokenReader` finds out which piece of a text belongs to which
token, step by step, and gives the same entries however the steps cut the output.
Invariants: in completions `tokens`, joined, are the text, and `text_offset` says where each begins in it
(a token that ends inside a character has no text; the one that completes it has all of it). In chat
`bytes`, joined, are the text in UTF-8, where no stop string cut it; they are null for a token that put
nothing into the text (a skipped special token, the one that ended it).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.request import CompletionOutput, PromptLogprob
from jaxserve.text.tokenizer import Tokenizer

LEAST = -9999.0  # what OpenAI writes for a token that is as good as impossible
Top = Sequence[tuple[int, float]]


class TokenNames:
    """Tokens as texts.

    Args:
        tokenizer: None where the checkpoint has none; tokens are then named by their ids.
        as_ids: name them all by their ids: "token_id:ID".
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self.as_ids = as_ids or tokenizer is None

    def name(self, token_id: int) -> str:
        r"""The token's text; of bytes that are no text "bytes:\xNN...", as OpenAI writes them."""
        data = b"" if self.tokenizer is None else self.tokenizer.token_bytes(token_id)
        if self.as_ids or not data:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def is_skipped(self, token_id: int) -> bool:
        """Whether it is left out of texts without special tokens."""
        return self.tokenizer is not None and self.tokenizer.is_special(token_id)

    def bytes(self, token_id: int) -> bytes:
        """The token's bytes; empty where there is no tokenizer."""
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token_id)


@dataclass(slots=True)
class TokenEntry:
    """One token of an output or a prompt.

    Args:
        token_id: the token.
        logprob: natural log of its probability; None for the first token of a prompt.
        top: the likeliest tokens in its place, best first.
        start: where its text begins, in characters.
        text: what of the text is its own; "" inside a character.
        data: its bytes; None when it put nothing into the text.
    """

    token_id: int
    logprob: float | None
    top: Top
    start: int
    text: str
    data: bytes | None


class TokenReader:
    """Gives the entries of one text's tokens, as its pieces come.

    Args:
        names: of the tokens.
        skip_special_tokens: whether the text is without special tokens.
        start: where the text begins.
    """

    def __init__(self, names: TokenNames, *, skip_special_tokens: bool, start: int = 0) -> None:
        self._names = names
        self._skips = skip_special_tokens
        tokenizer = names.tokenizer
        self._detokenizer = (
            None
            if tokenizer is None
            else tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        )
        self._open: deque[tuple[int, float | None, Top]] = deque()  # without an entry
        self._text = ""  # what may belong to tokens without an entry
        self._offset = 0  # where _text begins, in what was read
        self._start = start
        self._num_entries = 0

    def feed_output(self, output: CompletionOutput) -> list[TokenEntry]:
        """The entries that a piece of a choice makes known; all that are left at its end."""
        tops: Sequence[Top] = output.top_logprobs or [()] * len(output.token_ids)
        tokens = zip(output.token_ids, output.logprobs or (), tops, strict=True)
        is_last = output.finish_reason is not None
        entries = self.feed(tokens, output.text, is_last=is_last)
        by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        if by_token and entries and not entries[-1].text:
            entries[-1].data = None  # the token that ended it
        return entries

    def feed(
        self, tokens: Iterable[tuple[int, float | None, Top]], text: str, *, is_last: bool
    ) -> list[TokenEntry]:
        """The entries that are known by now.

        Args:
            tokens: the next (id, logprob, likeliest ones).
            text: the next text; it may be ahead of the tokens, never behind.
            is_last: nothing comes after this.
        """
        self._text += text
        spans: list[tuple[int, int]] = []
        for token in tokens:
            self._open.append(token)
            if self._detokenizer is not None:
                spans += self._detokenizer.feed(token[0]).spans
        if is_last and self._detokenizer is not None:
            spans += self._detokenizer.finish().spans
        entries = [self._entry(*span) for span in spans]
        if is_last or self._detokenizer is None:
            end = self._offset + len(self._text) if is_last else 0
            entries += [self._entry(end, end) for _ in range(len(self._open))]
        elif spans:
            self._text = self._text[spans[-1][1] - self._offset :]
            self._offset = spans[-1][1]
        return entries

    def _entry(self, start: int, end: int) -> TokenEntry:
        token_id, logprob, top = self._open.popleft()
        known_end = self._offset + len(self._text)  # a stop string may have cut the last tokens
        start, end = min(start, known_end), min(end, known_end)
        text = self._text[start - self._offset : end - self._offset]
        data = self._data(token_id, text)
        self._num_entries += 1
        return TokenEntry(token_id, logprob, top, self._start + start, text, data)

    def _data(self, token_id: int, text: str) -> bytes | None:
        if self._skips and self._names.is_skipped(token_id):
            return None
        data = self._names.bytes(token_id)
        is_first = self._num_entries == 0
        if is_first and text and data.startswith(b" ") and not text.startswith(" "):
            return data[1:]  # decoders of words strip the first one's space
        return data


def prompt_entries(
    token_ids: Sequence[int],
    text: str,
    logprobs: Sequence[PromptLogprob | None],
    names: TokenNames,
    *,
    skip_special_tokens: bool,
) -> list[TokenEntry]:
    """The entries of a prompt.

    Args:
        token_ids: the prompt.
        text: of it.
        logprobs: one a token; None for the first.
        names: of tokens.
        skip_special_tokens: whether the text is without special tokens.
    """
    reader = TokenReader(names, skip_special_tokens=skip_special_tokens)
    tokens = [
        (token_id, None, ()) if one is None else (token_id, one.logprob, one.top)
        for token_id, one in zip(token_ids, logprobs, strict=True)
    ]
    return reader.feed(tokens, text, is_last=True)


def completion_layout(
    entries: Sequence[TokenEntry], names: TokenNames, num_top: int
) -> dict[str, list[Any]]:
    """Lists side by side, an element a token.

    Args:
        entries: the tokens.
        names: of tokens.
        num_top: how many of the likeliest are wanted; the token itself is always among them.
    """
    return {
        "tokens": [names.name(e.token_id) if names.as_ids else e.text for e in entries],
        "token_logprobs": [_clamped(e.logprob) for e in entries],
        "top_logprobs": [_top_by_name(e, names, num_top) for e in entries],
        "text_offset": [e.start for e in entries],
    }


def _top_by_name(entry: TokenEntry, names: TokenNames, num_top: int) -> dict[str, float] | None:
    """Name -> log probability, best first; None where nothing comes before the token."""
    if entry.logprob is None:
        return None
    own = entry.text if entry.text and not names.as_ids else names.name(entry.token_id)
    found: dict[str, float] = {}
    for token_id, logprob in entry.top[:num_top]:
        if token_id == entry.token_id:
            found[own] = _clamped(entry.logprob)
            continue
        name = names.name(token_id)
        # Two tokens may look the same (a word with and without the space that was stripped).
        name = f"token_id:{token_id}" if name in found or name == own else name
        found[name] = _clamped(logprob)
    return found if own in found else {**found, own: _clamped(entry.logprob)}


def chat_layout(
    entries: Sequence[TokenEntry], names: TokenNames, num_top: int
) -> list[dict[str, Any]]:
    """An object a token, with the likeliest ones in its place."""
    return [
        {
            "token": names.name(e.token_id),
            "bytes": None if e.data is None else list(e.data),
            "logprob": _clamped(e.logprob),
            "top_logprobs": [
                {
                    "token": names.name(token_id),
                    "bytes": list(names.bytes(token_id)),
                    "logprob": _clamped(logprob),
                }
                for token_id, logprob in e.top[:num_top]
            ],
        }
        for e in entries
    ]


def prompt_layout(
    logprobs: Sequence[PromptLogprob | None], token_ids: Sequence[int], names: TokenNames
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM gives them: a token id -> {logprob, rank, decoded_token}; null first."""
    return [
        None if one is None else _ranked(one, token_id, names)
        for token_id, one in zip(token_ids, logprobs, strict=True)
    ]


def _ranked(one: PromptLogprob, token_id: int, names: TokenNames) -> dict[str, Any]:
    found = {str(other): (logprob, rank) for rank, (other, logprob) in enumerate(one.top, start=1)}
    found[str(token_id)] = (one.logprob, one.rank)
    return {
        key: {"logprob": _clamped(logprob), "rank": rank, "decoded_token": names.name(int(key))}
        for key, (logprob, rank) in found.items()
    }


def _clamped(logprob: float | None) -> Any:
    """A log probability that JSON can hold."""
    return None if logprob is None else max(float(logprob), LEAST)
