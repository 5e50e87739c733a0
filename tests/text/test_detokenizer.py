"""The incremental detokenizer against the full decode, for every kind of decoder."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from jaxserve.text.detokenizer import REPLACEMENT, IncrementalDetokenizer
from jaxserve.text.tokenizer import Tokenizer
from tests.text import tokenizers_for_tests as make

BYTE_LEVEL = make.wrap(make.byte_level())
SENTENCEPIECE = make.wrap(make.sentencepiece_like())
CLEANED = make.wrap(make.unigram_metaspace(), clean_up_tokenization_spaces=True)
ALL = {
    "byte_level": BYTE_LEVEL,
    "sentencepiece": SENTENCEPIECE,
    "unigram": make.wrap(make.unigram_metaspace()),
    "unigram_cleaned": CLEANED,
    "word_piece": make.wrap(make.word_piece()),
}


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("skip", [True, False])
def test_joined_deltas_are_the_full_decode(name, skip):
    tokenizer = ALL[name]
    any_id = st.integers(0, tokenizer.vocab_size + 2)  # a few beyond the vocabulary

    @settings(max_examples=150, deadline=None)
    @given(st.lists(any_id, max_size=60))
    def check(ids):
        deltas = stream(tokenizer, ids, skip)
        full = tokenizer.decode(ids, skip)
        assert "".join(deltas) == full
        if REPLACEMENT not in full:
            assert not any(REPLACEMENT in delta for delta in deltas)

    check()


def token(tokenizer: Tokenizer, text: str) -> int:
    (token_id,) = (
        i for i in range(tokenizer.vocab_size) if tokenizer._tokenizer.id_to_token(i) == text
    )
    return token_id


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80))
@example(b"\xff\xe2" + b"\x82" * 40)
@example("é€🙂".encode() * 9 + b"\xf0\x9f")
def test_any_bytes_as_byte_level_tokens(data):
    ids = [token(BYTE_LEVEL, BYTE_TO_CHAR[byte]) for byte in data]
    assert "".join(stream(BYTE_LEVEL, ids)) == data.decode(errors="replace")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from([0x41, 0xC3, 0xA9, 0xFF]), st.just(-1), st.just(-2))))
def test_any_bytes_as_byte_fallback_tokens(values):
    names = {-1: "▁a", -2: "</s>"}
    ids = [token(SENTENCEPIECE, names.get(v, f"<0x{v:02X}>")) for v in values]
    assert "".join(stream(SENTENCEPIECE, ids)) == SENTENCEPIECE.decode(ids)


def _byte_to_char() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


BYTE_TO_CHAR = _byte_to_char()


@pytest.mark.parametrize("text", [" Olá ďbel 🙂 end", " x 👩‍🚀 end"])
def test_c01_characters_of_several_tokens_arrive_whole(text):
    ids = BYTE_LEVEL.encode(text)
    assert len(ids) > len(text) // 2
    assert any(
        len(BYTE_LEVEL.decode([i])) == 1 and BYTE_LEVEL.decode([i]) == REPLACEMENT for i in ids
    )
    deltas = stream(BYTE_LEVEL, ids)
    assert "".join(deltas) == BYTE_LEVEL.decode(ids) == text
    assert deltas[0].startswith(" ")
    assert not any(REPLACEMENT in delta for delta in deltas)
    # The control: decoding each token alone is what the reported faults did.
    assert REPLACEMENT in "".join(BYTE_LEVEL.decode([i]) for i in ids)


def test_a_character_is_returned_with_its_last_piece_not_later():
    ids = BYTE_LEVEL.encode("a🙂")
    assert stream(BYTE_LEVEL, ids) == ["a", "", "", "", "🙂", ""]


def test_leading_space_is_stripped_once_not_at_each_window():
    ids = [token(SENTENCEPIECE, "▁a")] * 50
    assert stream(SENTENCEPIECE, ids) == ["a", *[" a"] * 49, ""]


def test_skipped_specials_in_the_middle_of_a_character_do_not_break_it():
    pieces = BYTE_LEVEL.encode("🙂")
    special = token(BYTE_LEVEL, "<|im_end|>")
    ids = [pieces[0], special, *pieces[1:], special]
    assert "".join(stream(BYTE_LEVEL, ids)) == "🙂"
    assert "<|im_end|>" in "".join(stream(BYTE_LEVEL, ids, skip=False))


def test_a_bad_byte_spoils_its_whole_fallback_run_so_the_run_waits():
    ids = [token(SENTENCEPIECE, t) for t in ("<0x41>", "<0xC3>", "<0xA9>", "<0xFF>", "b")]
    assert SENTENCEPIECE.decode(ids) == REPLACEMENT * 4 + "b"
    assert stream(SENTENCEPIECE, ids) == ["", "", "", "", REPLACEMENT * 4 + "b", ""]


@pytest.mark.parametrize("name", ALL)
def test_work_per_token_is_bounded(name):
    tokenizer = ALL[name]
    ids = [i % tokenizer.vocab_size for i in range(0, 4000, 7)]
    sizes = []

    def decode(window: list[int]) -> str:
        sizes.append(len(window))
        return tokenizer.decode(window)

    source = tokenizer.detokenizer()
    detokenizer = IncrementalDetokenizer(
        decode, is_skipped=source._is_skipped, num_unstable_chars=source._num_unstable_chars
    )
    for token_id in ids:
        detokenizer.push(token_id)
    # Cleaned text waits 32 characters, so its window holds as many single-character tokens more.
    assert max(sizes) <= (160 if tokenizer is CLEANED else 30)
    assert sum(sizes) < (200 if tokenizer is CLEANED else 30) * len(ids)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=40))
def test_spans_cover_the_text_in_order(ids):
    detokenizer = BYTE_LEVEL.detokenizer()
    text, spans = "", []
    for token_id in ids:
        delta = detokenizer.feed(token_id)
        text += delta.text
        spans += delta.spans
        assert all(end <= len(text) for _, end in spans)
        assert len(spans) + len(detokenizer.pending_starts()) <= len(ids)
    spans += detokenizer.finish().spans
    assert len(spans) == len(ids)
    edges = [edge for span in spans for edge in span]
    assert edges == sorted(edges)
    assert all(before[1] == after[0] for before, after in pairwise(spans))
