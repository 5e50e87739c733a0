"""The tokens that tokenizer_config.json names, beside those of tokenizer.json. Used by `text.tokenizer`."""

from collections.abc import Collection, Mapping
from typing import Any

import tokenizers

from jaxserve.errors import CheckpointError

_ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _content(value: object) -> str | None:
    """The text of a token that is written as a string or as an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Names and texts of the special tokens a config names: `bos_token` and the like, custom
    `*_token` too.
    """
    tokens = {
        name: _content(value)
        for name, value in config.items()
        if name.endswith("_token") and not name.startswith("add_")
    }
    return {name: token for name, token in tokens.items() if token is not None}


def add_config_tokens(
    tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Add the tokens that tokenizer_config.json knows and tokenizer.json lacks, named ones as
    special.
    """
    present = list(tokenizer.get_added_tokens_decoder().values())
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    values = list(extra.values()) if isinstance(extra, Mapping) else list(extra)
    named = dict.fromkeys([*special_tokens.values(), *filter(None, map(_content, values))])
    # A token listed with other flags than it has in tokenizer.json takes the listed flags.
    flags_known = {repr(token) for token in present}
    listed = [token for token in _listed_tokens(config, named) if repr(token) not in flags_known]
    contents = {token.content for token in [*present, *listed]}
    missing = [
        tokenizers.AddedToken(name, special=True, normalized=False)
        for name in named
        if name not in contents
    ]
    tokenizer.add_tokens(listed + missing)


def _listed_tokens(
    config: Mapping[str, Any], named: Collection[str]
) -> list[tokenizers.AddedToken]:
    """The added_tokens_decoder of tokenizer_config.json, by rising id."""
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping) or not all(str(key).isdigit() for key in listed):
        raise CheckpointError(
            f"tokenizer_config.json: added_tokens_decoder must map ids to tokens, found {listed!r}"
        )
    tokens = []
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        content = _content(entry)
        if content is None or not isinstance(entry, Mapping):
            raise CheckpointError(
                f"tokenizer_config.json: added_tokens_decoder[{key}] must be an object with a "
                f"string content, found {entry!r}"
            )
        flags = {name: bool(entry[name]) for name in _ADDED_TOKEN_FLAGS if name in entry}
        flags["special"] = flags.get("special", False) or content in named
        tokens.append(tokenizers.AddedToken(content, **flags))
    return tokens
