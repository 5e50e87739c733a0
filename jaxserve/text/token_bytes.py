"""The bytes that one token stands for: `TokenBytes`. Used by `text.tokenizer`, for replies that list tokens.

Invariant: where the tokenizer works on bytes, the bytes of a text's tokens, one behind the other, are
the text in UTF-8 (a decoder that strips the space before the first token leaves it out of the text
alone); half a character keeps its own bytes.
"""

import json
import re
from collections.abc import Callable, Sequence

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of each token of a vocabulary, found when they are asked for.

    Args:
        tokenizer: with all of its added tokens.
        decode: its ids -> text, special tokens included.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._tokenizer = tokenizer
        self._decode = decode
        self._added = {
            token_id: token.content.encode()
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        kinds = _decoder_kinds(tokenizer)
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._found: dict[int, bytes] = {}  # at most one entry a token

    def __call__(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an id that stands for none."""
        found = self._found.get(token_id)
        if found is None:
            found = self._found[token_id] = self._find(token_id)
        return found

    def _find(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            return b"".join(
                bytes([_BYTE_OF_CHAR[c]]) if c in _BYTE_OF_CHAR else c.encode() for c in piece
            )
        byte = _BYTE_TOKEN.fullmatch(piece) if self._has_byte_tokens else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        # Behind itself, where no decoder strips its leading space.
        once, twice = self._decode([token_id]), self._decode([token_id, token_id])
        return twice[len(once) :].encode()


def _decoder_kinds(tokenizer: tokenizers.Tokenizer) -> set[str]:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    return {part.get("type") for part in decoder.get("decoders", [decoder])}


def _byte_of_char() -> dict[str, int]:
    """The alphabet in which byte-level tokenizers write the 256 bytes. Source: GPT-2's encoder."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_of_char()
