"""tokenizer.json, tokenizer_config.json and the chat template, rebuilt from GGUF metadata.

Used by `gguf.py`. GGUF stores a byte-level BPE as tokens, merges and the *name* of its
pre-tokenizer; the name stands for how text is cut before BPE, so an unknown one is refused:
guessing would tokenize almost everything right.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jaxserve.errors import CheckpointError
from jaxserve.text.chat_template import DEFAULT, TemplateSource


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


# tokenizer.ggml.pre -> how text is cut. "smollm" splits every digit off first.
_PRE_TOKENIZERS = {
    "gpt-2": _byte_level,
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _byte_level()]
    ),
}


def tokenizer_json(path: Path, metadata: Mapping[str, Any]) -> str | None:
    """The text of tokenizer.json, or None when the file holds no tokenizer.

    Args:
        path: the GGUF file, for messages.
        metadata: its key-value pairs.

    Raises:
        CheckpointError: a tokenizer model or pre-tokenizer that is not known, or tables that do not
            fit together.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None or model == "no_vocab":
        return None
    if model != "gpt2":
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model must be 'gpt2' (byte-level BPE), got {model!r}"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.pre must be one of {', '.join(_PRE_TOKENIZERS)}, got {pre!r}"
        )
    tokens = _strings(path, metadata, "tokens")
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(
            f"{path}: tokenizer.ggml.tokens holds {len(tokens) - len(vocab)} duplicates"
        )
    merges = [_merge(path, text, vocab) for text in _strings(path, metadata, "merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(path, metadata, tokenizer, tokens)
    if metadata.get("tokenizer.ggml.add_bos_token"):
        bos_id, bos = _token(path, metadata, tokens, "bos_token_id")
        if bos is None:
            raise CheckpointError(
                f"{path}: tokenizer.ggml.add_bos_token is true, but there is no bos_token_id"
            )
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)]
        )
    return tokenizer.to_str(pretty=True) + "\n"


def _merge(path: Path, text: str, vocab: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if not {left, right, left + right} <= vocab.keys():
        raise CheckpointError(
            f"{path}: tokenizer.ggml.merges: {text!r} is no merge of two tokens into a third"
        )
    return left, right


def _add_special_tokens(
    path: Path, metadata: Mapping[str, Any], tokenizer: Tokenizer, tokens: list[str]
) -> None:
    kinds = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.token_type must hold {len(tokens)} entries")
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    user = [t for t, kind in zip(tokens, kinds, strict=True) if kind == TokenType.USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in user])


def _strings(path: Path, metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{path}: tokenizer.ggml.{key} must be an array of strings")
    return value


def _token(
    path: Path, metadata: Mapping[str, Any], tokens: list[str], key: str
) -> tuple[int, str | None]:
    number = metadata.get(f"tokenizer.ggml.{key}")
    if number is None:
        return -1, None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise CheckpointError(
            f"{path}: tokenizer.ggml.{key} must be in [0, {len(tokens)}), got {number!r}"
        )
    return number, tokens[number]


def tokenizer_config(path: Path, metadata: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    """The object of tokenizer_config.json, {} when the file holds no tokenizer; max_length is in tokens."""
    if not isinstance(metadata.get("tokenizer.ggml.tokens"), list):
        return {}
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    for name, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        _, token = _token(path, metadata, tokens, key)
        if token is not None:
            config[name] = token
    return config


def chat_template(path: Path, metadata: Mapping[str, Any]) -> TemplateSource:
    """The Jinja text of the chat template, or the texts of several by name, or None."""
    key = "tokenizer.chat_template"
    names = metadata.get(f"{key}s") or []
    keys = {str(name): f"{key}.{name}" for name in names} | {DEFAULT: key}
    templates = {name: metadata[one] for name, one in keys.items() if metadata.get(one) is not None}
    for name, text in templates.items():
        if not isinstance(text, str):
            raise CheckpointError(f"{path}: {keys[name]} must be a string, got {text!r}")
    return templates.get(DEFAULT) if set(templates) <= {DEFAULT} else templates
