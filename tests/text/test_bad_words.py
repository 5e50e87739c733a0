"""Bad words as the tokenizer writes them."""

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.text.bad_words import bad_word_ids
from tests.text import tokenizers_for_tests as make

BYTE_LEVEL = make.wrap(make.byte_level())
SENTENCEPIECE = make.wrap(make.sentencepiece_like())


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
def test_a_text_is_forbidden_at_the_beginning_and_behind_a_space(tokenizer):
    def ids(text):
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    assert bad_word_ids(tokenizer, ["ab"]) == tuple(dict.fromkeys([ids("ab"), ids(" ab")]))
    assert set(bad_word_ids(tokenizer, [" ab"])) == {ids("ab"), ids(" ab")}
    assert set(bad_word_ids(tokenizer, ["  ab"])) == {ids("  ab"), ids("ab"), ids(" ab")}
    assert bad_word_ids(tokenizer, ["ab"])[0] == ids("ab")


def test_one_token_behind_a_space_is_found_whole():
    (bare, spaced) = bad_word_ids(BYTE_LEVEL, ["hello"])
    assert [BYTE_LEVEL.decode(list(ids)) for ids in (bare, spaced)] == ["hello", " hello"]
    assert len(spaced) == 1


def test_ids_stay_and_nothing_is_there_twice():
    assert bad_word_ids(BYTE_LEVEL, [(5, 6), [5, 6], (7,)]) == ((5, 6), (7,))
    twice = bad_word_ids(BYTE_LEVEL, ["hello", "hello"])
    assert twice == bad_word_ids(BYTE_LEVEL, ["hello"])


def test_white_space_is_a_word_too():
    assert bad_word_ids(BYTE_LEVEL, ["\n"])[0] == tuple(BYTE_LEVEL.encode("\n"))


def test_a_text_of_half_a_character_is_refused():
    with pytest.raises(InvalidRequestError, match="surrogate") as caught:
        bad_word_ids(BYTE_LEVEL, ["\ud800"])
    assert caught.value.param == "bad_words"
