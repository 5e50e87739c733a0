"""tokenizer.json, tokenizer_config.json and the chat template, rebuilt from GGUF metadata.

Used by `gguf.py`. GGUF stores a byte-level BPE as tokens, merges and the *name* of its
pre-tokenizer; the name stands for how text is cut before BPE, so an unknown one is refused:
guessing would tokenize almost everything right. A SentencePiece BPE ("llama") is stored as pieces with
scores; its merges are every two pieces that make a third, in the order of the third's score.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jaxserve.errors import CheckpointError, shown
from jaxserve.text.chat_template import DEFAULT, TemplateSource

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True, kw_only=True)
class _Pre:
    """What the name of a pre-tokenizer stands for.

    Args:
        pattern: text is cut into its matches; None: as GPT-2 cuts it.
        splits_digits: whether every digit is cut off before that.
        normalizes: to Unicode's composed form (NFC).
        ignores_merges: whether a piece that is a token as a whole is not cut by merges first.
        begins: whether a text begins with the bos token where the file does not say.
    """

    pattern: str | None = None
    splits_digits: bool = False
    normalizes: bool = False
    ignores_merges: bool = False
    begins: bool = False


_LLAMA3 = _Pre(pattern=rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", ignores_merges=True, begins=True)
# By tokenizer.ggml.pre. Source: the tokenizer.json of these models, and which name stands for which in
# llama-vocab.cpp of https://github.com/ggml-org/llama.cpp.
_PRE_TOKENIZERS = {
    "gpt-2": _Pre(),
    "smollm": _Pre(splits_digits=True),
    "refact": _Pre(splits_digits=True),
    "starcoder": _Pre(splits_digits=True),
    "qwen2": _Pre(pattern=rf"{_WORDS}|\p{{N}}|{_REST}", normalizes=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "dbrx": _Pre(pattern=_LLAMA3.pattern),
    "smaug-bpe": _Pre(pattern=_LLAMA3.pattern),
    "tekken": _Pre(
        pattern=(
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        ignores_merges=True,
    ),
}
_MAX_PIECE_LENGTH = 512  # characters; every way to cut a piece in two is looked at
_SPACE = "\u2581"  # stands for a space in the pieces of SentencePiece


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
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in makers:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model must be 'gpt2' (byte-level BPE) or 'llama' (SentencePiece),"
            f" got {shown(model)}"
        )
    tokens = _strings(path, metadata, "tokens")
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(
            f"{path}: tokenizer.ggml.tokens holds {len(tokens) - len(vocab)} duplicates"
        )
    tokenizer = makers[model](path, metadata, vocab)
    _add_special_tokens(path, metadata, tokenizer, tokens)
    if _flag(metadata, "add_bos_token", _begins(metadata)):
        bos_id, bos = _token(path, metadata, tokens, "bos_token_id")
        if bos is None:
            raise CheckpointError(
                f"{path}: texts begin with the bos token (tokenizer.ggml.add_bos_token, or the default of"
                " this tokenizer), but there is no bos_token_id"
            )
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)]
        )
    return tokenizer.to_str(pretty=True) + "\n"


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}")
    return default if value is None else bool(value)


def _byte_level(path: Path, metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> Tokenizer:
    """A byte-level BPE."""
    name = metadata.get("tokenizer.ggml.pre")
    pre = _PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.pre must be one of {', '.join(_PRE_TOKENIZERS)}, got {shown(name)}"
        )
    merges = [_merge(path, text, vocab) for text in _strings(path, metadata, "merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab=dict(vocab), merges=merges, ignore_merges=pre.ignores_merges)
    )
    steps: list[Any] = []
    if pre.splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if pre.normalizes:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(path: Path, metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> Tokenizer:
    """A BPE over characters with bytes for those that are no piece, as Llama 2, Mistral and Phi-3 have it."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not (
        isinstance(scores, list)
        and len(scores) == len(vocab)
        and all(isinstance(score, float) for score in scores)
    ):
        raise CheckpointError(f"{path}: tokenizer.ggml.scores must hold {len(vocab)} floats")
    kinds = _kinds(path, metadata, len(vocab))
    pieces = {token for token, kind in zip(vocab, kinds, strict=True) if kind == TokenType.NORMAL}
    longest = max(map(len, pieces), default=0)
    if longest > _MAX_PIECE_LENGTH:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.tokens: a piece must have at most {_MAX_PIECE_LENGTH} characters,"
            f" one has {longest}"
        )
    merges = _merges_of_scores(pieces, vocab, scores)
    _, unknown = _token(path, metadata, list(vocab), "unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=dict(vocab),
            merges=merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = _flag(metadata, "add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    )
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_of_scores(
    pieces: set[str], vocab: Mapping[str, int], scores: list[float]
) -> list[tuple[str, str]]:
    merges = []
    for piece in pieces:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                merges.append((-scores[vocab[piece]], -cut, vocab[piece], (left, right)))
    return [pair for *_, pair in sorted(merges)]


def _merge(path: Path, text: str, vocab: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if not {left, right, left + right} <= vocab.keys():
        raise CheckpointError(
            f"{path}: tokenizer.ggml.merges: {text!r} is no merge of two tokens into a third"
        )
    return left, right


def _kinds(path: Path, metadata: Mapping[str, Any], num_tokens: int) -> list[Any]:
    kinds = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * num_tokens
    if not isinstance(kinds, list) or len(kinds) != num_tokens:
        raise CheckpointError(f"{path}: tokenizer.ggml.token_type must hold {num_tokens} entries")
    return kinds


# Phi-3's special tokens take the spaces and line ends behind them; but for these. Files do not say so.
_TAKES_NO_SPACES = ("<unk>", "<s>", "<|endoftext|>")


def _add_special_tokens(
    path: Path, metadata: Mapping[str, Any], tokenizer: Tokenizer, tokens: list[str]
) -> None:
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    strips = is_sentencepiece and metadata.get("general.architecture") == "phi3"
    special = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
    if is_sentencepiece:
        special[TokenType.UNKNOWN] = True
    added: dict[bool, list[AddedToken]] = {True: [], False: []}
    for token, kind in zip(tokens, _kinds(path, metadata, len(tokens)), strict=True):
        if kind in special:
            rstrip = strips and token not in _TAKES_NO_SPACES
            added[special[kind]].append(
                AddedToken(token, special=special[kind], normalized=False, rstrip=rstrip)
            )
    tokenizer.add_special_tokens(added[True])
    tokenizer.add_tokens(added[False])


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


def _begins(metadata: Mapping[str, Any]) -> bool:
    """Whether texts begin with bos where the file does not say."""
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    pre = _PRE_TOKENIZERS.get(str(metadata.get("tokenizer.ggml.pre")))
    return pre is not None and pre.begins


def tokenizer_config(path: Path, metadata: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    """The object of tokenizer_config.json, {} when the file holds no tokenizer; max_length is in tokens."""
    if not isinstance(metadata.get("tokenizer.ggml.tokens"), list):
        return {}
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _flag(metadata, "add_bos_token", _begins(metadata)),
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
