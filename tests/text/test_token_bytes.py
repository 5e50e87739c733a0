import tokenizers
from tokenizers import decoders, models

from jaxserve.text.token_bytes import TokenBytes
from jaxserve.text.tokenizer import Tokenizer
from tests.llms import TINY


def _bytes_of(vocab, decoder):
    model = models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>"])
    return TokenBytes(tokenizer, lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False))


def test_byte_level_tokens_have_their_own_bytes():
    tokenizer = Tokenizer.from_directory(TINY)
    text = "Olá 🙂👩‍🚀\n\x00 end"
    ids = tokenizer.encode(text)
    pieces = [tokenizer.token_bytes(i) for i in ids]
    assert b"".join(pieces).decode() == text
    assert any(len(piece) < len(piece.decode("utf-8", "replace").encode()) for piece in pieces)
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""
    every = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= every


def test_words_and_byte_fallback_as_sentencepiece_has_them():
    decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    vocab = {"<unk>": 0, "▁the": 1, "re": 2, "<0xF0>": 3, "<0x0A>": 4, "▁▁": 5}
    found = _bytes_of(vocab, decoder)
    assert [found(i) for i in range(1, 6)] == [b" the", b"re", b"\xf0", b"\n", b"  "]
    assert found(6) == b"<s>"


def test_word_pieces():
    vocab = {"<unk>": 0, "play": 1, "##ing": 2}
    found = _bytes_of(vocab, decoders.WordPiece("##", cleanup=False))
    assert [found(1), found(2)] == [b" play", b"ing"]
