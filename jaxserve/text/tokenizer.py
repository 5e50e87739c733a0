"""Text to token ids and back, as Hugging Face tokenizers do it: `Tokenizer`. Used by `llm`, `cli`
and `text.watcher`.

It wraps the `tokenizers` library alone; what `transformers` adds on top of it when it loads the
same files is done here: special tokens that only the config names are added, truncation and padding
stored in the file are switched off, and whether a BOS is added is decided by the post-processor of
tokenizer.json (add_bos_token in tokenizer_config.json has no say where a tokenizer.json exists, as
in transformers 5).

Invariant: one `Tokenizer` is shared by all requests and threads, and never changes after it is
    made.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.field_checks import utf8
from jaxserve.text.added_tokens import add_config_tokens, special_tokens
from jaxserve.text.chat_template import ChatTemplate, TemplateSource
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.template_files import config_templates, directory_templates
from jaxserve.text.token_bytes import TokenBytes

# The clean-up of English WordPiece texts, in this order. Source: transformers,
# clean_up_tokenization.
_CLEAN_UPS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
# Each of the ten steps looks at most three characters ahead, so no id changes text further back
# than this.
_MAX_CLEAN_UP_REACH = 32
# Characters, or ids. The functions for several texts give the interpreter's lock away while they work;
# those for one are quicker to call, and hold it.
_LONG = 1000
_MAX_COMPOSED = 4  # characters that NFC makes one of, with some to spare


class TokenizerTexts(NamedTuple):
    """What a `Tokenizer` is made of: tokenizer.json, tokenizer_config.json, the templates given beside."""

    tokenizer_json: str
    tokenizer_config: str
    chat_template: str | dict[str, str] | None


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        tokenizer_json: the text of tokenizer.json.
        tokenizer_config: the object of tokenizer_config.json; {} if there is none.
        chat_template: Jinja source, or name -> Jinja source; None = what `tokenizer_config` has, if
            anything.

    Raises:
        CheckpointError: the files are not a tokenizer.
    """

    def __init__(
        self,
        tokenizer_json: str,
        tokenizer_config: Mapping[str, Any],
        chat_template: TemplateSource = None,
    ) -> None:
        self._tokenizer = _load(tokenizer_json)
        self._config, self._given_template = tokenizer_config, chat_template
        self._special_tokens = special_tokens(tokenizer_config)
        add_config_tokens(self._tokenizer, tokenizer_config, self._special_tokens)
        self._special_ids = frozenset(
            token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._byte_ids = _byte_fallback_ids(self._tokenizer)
        self._most_chars = _most_chars_of_a_token(self._tokenizer)
        self._token_bytes = TokenBytes(self._tokenizer, self._tokenizer_text)
        # Destructive for BPE, so transformers 5 ignores the setting there; so do we.
        self._cleans_up = bool(
            tokenizer_config.get("clean_up_tokenization_spaces")
        ) and not isinstance(self._tokenizer.model, tokenizers.models.BPE)
        self._template = ChatTemplate(
            config_templates(tokenizer_config) if chat_template is None else chat_template,
            special_tokens=self._special_tokens,
        )

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json and the files of chat templates (which beat those
        in the config).

        Args:
            path: a checkpoint directory; only tokenizer.json must be there.

        Raises:
            CheckpointError: a file is missing or broken; the message names it.
        """
        directory = Path(path)
        source = _read(directory / "tokenizer.json")
        if source is None:
            raise CheckpointError(
                f"{directory / 'tokenizer.json'}: no such file; a checkpoint needs one to work with text"
            )
        config = _read_object(directory / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # files of old versions keep the names apart
            config |= _read_object(directory / "special_tokens_map.json")
        try:
            return cls(source, config, directory_templates(directory))
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's vocabulary may be padded beyond it."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """The text of a tokenizer.json that holds every added token."""
        return self._tokenizer.to_str()

    def to_texts(self) -> "TokenizerTexts":
        """What an equal one can be made of, in another process."""
        template = self._given_template
        if isinstance(template, Mapping):
            template = dict(template)
        return TokenizerTexts(self.to_json(), json.dumps(dict(self._config)), template)

    @classmethod
    def from_texts(cls, texts: "TokenizerTexts") -> "Tokenizer":
        """One equal to that whose `to_texts` these are."""
        return cls(texts.tokenizer_json, json.loads(texts.tokenizer_config), texts.chat_template)

    def end_of_ids(self, limit: int) -> int:
        """One more than the largest id below `limit` that stands for a token; ids may have gaps."""
        ids = range(limit - 1, -1, -1)
        return next((i + 1 for i in ids if self._tokenizer.id_to_token(i) is not None), 0)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The id of the tokenizer's eos token, as a tuple; empty if it has none. A model may have
        more end ids.
        """
        eos_id = self._token_id("eos_token")
        return () if eos_id is None else (eos_id,)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Names and texts of the tokens that have a name: `bos_token`, `eos_token` and the like."""
        return dict(self._special_tokens)

    @property
    def bos_token(self) -> str | None:
        """The text of the beginning-of-sequence token, if the tokenizer names one."""
        return self._special_tokens.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of `bos_token`."""
        return self._token_id("bos_token")

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template, if there is one."""
        return self._template.source

    def with_chat_template(self, source: str) -> "Tokenizer":
        """The same tokenizer with another chat template.

        Args:
            source: Jinja source.

        Raises:
            CheckpointError: it is no template.
        """
        other = copy.copy(self)
        other._given_template = source
        other._template = ChatTemplate(source, special_tokens=self._special_tokens)
        other._template.check_source()
        return other

    @property
    def tool_chat_template(self) -> str | None:
        """The Jinja source of the chat template that is used with tools, if there is one."""
        return self._template.tool_source

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` and `encode_chat` can work at all."""
        return self._template.tool_source is not None

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        param: str = "prompt",
        most: int | None = None,
    ) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text; special tokens written in it become their ids, as in transformers.
            add_special_tokens: let the post-processor add its own (a BOS, usually).
            param: the request's field that the text comes from.
            most: tokens that can be used. A text that surely has more is refused without encoding it;
                others are the caller's to check.

        Raises:
            InvalidRequestError: not a string, or not valid Unicode (a lone surrogate); too long.
        """
        return self._encode(text, add_special_tokens=add_special_tokens, param=param, most=most)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary give none, bytes that are no character give
        U+FFFD.
        """
        if len(ids) > _LONG:
            (text,) = self._tokenizer.decode_batch(
                [list(ids)], skip_special_tokens=skip_special_tokens
            )
        else:
            text = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        if self._cleans_up:
            for old, new in _CLEAN_UPS:
                text = text.replace(old, new)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; of half a character its own. Empty for an id without a
        token.
        """
        return self._token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves the token out of a text."""
        return token_id in self._special_ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat template's text for a conversation; see `ChatTemplate.render`."""
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Token ids of a rendered conversation. A template writes its own BOS, so none is added.
        `most` is as in `encode`.

        Raises:
            InvalidRequestError: the messages or the tools are malformed or the template refused them;
                param "messages" or "tools".
        """
        text = self.render_chat(
            messages,
            add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return self._encode(text, add_special_tokens=False, param="messages", most=most)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A fresh incremental decoder; its joined text is `decode(ids, skip_special_tokens)`."""

        def is_skipped(token_id: int) -> bool:
            if skip_special_tokens and token_id in self._special_ids:
                return True
            return self._tokenizer.id_to_token(token_id) is None

        return IncrementalDetokenizer(
            lambda ids: self.decode(ids, skip_special_tokens),
            is_skipped=is_skipped,
            is_byte=self._byte_ids.__contains__,
            num_unstable_chars=_MAX_CLEAN_UP_REACH if self._cleans_up else 0,
        )

    def _tokenizer_text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _encode(
        self, text: str, *, add_special_tokens: bool, param: str, most: int | None
    ) -> list[int]:
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"{param} must be a string, got {type(text).__name__}", param=param
            )
        longest = self._most_chars
        if most is not None and longest is not None and len(text) > most * longest:
            raise InvalidRequestError(
                f"{param} has {len(text)} characters, but the context holds {most} tokens (max_model_len), "
                f"of {longest} characters at most",
                param=param,
                code="context_length_exceeded",
            )
        utf8(param, text)
        if len(text) > _LONG:
            (found,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return found.ids
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def _token_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)


def _load(tokenizer_json: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:
        raise CheckpointError(f"tokenizer.json: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    text = _read(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _byte_fallback_ids(tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of the <0x00> .. <0xFF> tokens, if the decoder turns them into bytes."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    if not any(part.get("type") == "ByteFallback" for part in parts):
        return frozenset()
    names = [f"<0x{byte:{spec}}>" for byte in range(256) for spec in ("02X", "02x")]
    ids = (tokenizer.token_to_id(name) for name in names)
    return frozenset(token_id for token_id in ids if token_id is not None)


def _most_chars_of_a_token(tokenizer: tokenizers.Tokenizer) -> int | None:
    """How many characters of a text one token stands for at most; None where nothing is known of it."""
    parts = json.loads(tokenizer.to_str())
    model, normalizer = parts["model"], parts.get("normalizer")
    has_unknown = any(model.get(name) is not None for name in ("unk_token", "unk_id"))
    if has_unknown and not model.get("byte_fallback"):
        return None  # one unknown token may stand for a run of characters
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    kinds = {step["type"] for step in steps}
    if not kinds <= {"NFC", "Prepend", "Replace"}:
        return None
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
    return longest * _MAX_COMPOSED if "NFC" in kinds else longest
