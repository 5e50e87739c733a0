"""The tokenizer against transformers over the same files, and what bad files and texts get."""

import json
import threading
import time

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken

from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.text.tokenizer import Tokenizer
from tests.llms import TINY
from tests.text import tokenizers_for_tests as make

TEXTS = [
    "",
    "hello world",
    " leading and trailing ",
    "Olá ďbel 🙂 👩‍🚀\n\n\tend",
    "<|im_start|>user\nhello<|im_end|>",
    "<s>a b ab</s> é.",
    "a  b    c ' . n't 日",
    "<plain> <|extra|> <named>",
]
SPECIAL_CONFIG = {
    "bos_token": "<|endoftext|>",
    "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False,
                  "normalized": False, "rstrip": False, "single_word": False},
    "added_tokens_decoder": {
        "900": {"content": "<|extra|>", "lstrip": True, "rstrip": False, "normalized": False,
                "single_word": False, "special": True},
        "901": {"content": "<named>", "lstrip": False, "rstrip": False, "normalized": True,
                "single_word": False, "special": False},
    },
    "pad_token": "<named>",
}  # fmt: skip


def truncating() -> tokenizers.Tokenizer:
    tokenizer = make.byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=20, pad_id=264, pad_token="<|endoftext|>")
    return tokenizer


CASES = {
    "byte_level": (make.byte_level(), {}),
    "byte_level_config_tokens": (make.byte_level(), SPECIAL_CONFIG),
    "byte_level_other_flags": (
        make.byte_level(),
        {
            "added_tokens_decoder": {
                "270": {"content": "<plain>", "special": True, "normalized": False}
            }
        },
    ),
    "extra_special_tokens": (make.byte_level(), {"extra_special_tokens": ["<|extra|>"]}),
    "additional_special_tokens": (make.byte_level(), {"additional_special_tokens": ["<named>"]}),
    "custom_token": (make.byte_level(), {"image_token": "<|extra|>"}),
    "eos_in_the_vocabulary": (make.byte_level(), {"eos_token": "hell"}),
    "sentencepiece": (make.sentencepiece_like(), {"bos_token": "<s>", "eos_token": "</s>"}),
    "no_bos_asked": (make.sentencepiece_like(), {"bos_token": "<s>", "add_bos_token": False}),
    "bos_asked": (make.byte_level(), {"bos_token": "<|endoftext|>", "add_bos_token": True}),
    "unigram": (make.unigram_metaspace(), {}),
    "unigram_cleaned": (make.unigram_metaspace(), {"clean_up_tokenization_spaces": True}),
    "bpe_cleaned": (make.byte_level(), {"clean_up_tokenization_spaces": True}),
    "word_piece": (make.word_piece(), {"clean_up_tokenization_spaces": True}),
    "truncating": (truncating(), {"model_max_length": 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_encode_and_decode_as_transformers_does(name, tmp_path):
    tokenizer, config = CASES[name]
    make.write(tmp_path, tokenizer, **config)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token == theirs.bos_token
    expected_eos = () if theirs.eos_token is None else (theirs.eos_token_id,)
    assert ours.eos_token_ids == expected_eos
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == expected, text


def test_bos_comes_from_the_post_processor():
    tokenizer = make.wrap(make.sentencepiece_like(), bos_token="<s>", add_bos_token=False)
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 1
    assert 1 not in tokenizer.encode("a", add_special_tokens=False)


def test_old_special_tokens_map_is_read(tmp_path):
    make.write(tmp_path, make.byte_level())
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|endoftext|>"})
    )
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.bos_token == theirs.bos_token == "<|endoftext|>"


def test_no_eos_no_bos():
    tokenizer = make.wrap(make.byte_level())
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.bos_token is None
    assert tokenizer.bos_token_id is None


def test_ids_outside_the_vocabulary_give_no_text():
    tokenizer = make.wrap(make.byte_level())
    hello = tokenizer.encode("hello")
    assert tokenizer.decode([*hello, tokenizer.vocab_size, 49151]) == "hello"


@pytest.mark.parametrize("text", ["\ud800", "abc \udcff", "\ude42\ud83d"])
def test_lone_surrogates_are_refused(text):
    with pytest.raises(InvalidRequestError, match="surrogate") as caught:
        make.wrap(make.byte_level()).encode(text)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("value", [None, 3, b"bytes", ["a"]])
def test_only_strings_are_encoded(value):
    with pytest.raises(InvalidRequestError, match="prompt must be a string") as caught:
        make.wrap(make.byte_level()).encode(value)
    assert caught.value.param == "prompt"


def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[1, 2", '{"model": {"type": "nonsense"}}'])
def test_broken_tokenizer_is_named(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ('{"chat_template": 3}', "chat_template must be a string"),
        ('{"added_tokens_decoder": ["a"]}', "added_tokens_decoder must map ids"),
        ('{"added_tokens_decoder": {"5": {"special": true}}}', r"added_tokens_decoder\[5\]"),
    ],
)
def test_broken_tokenizer_config_is_named(tmp_path, text, message):
    make.write(tmp_path, make.byte_level())
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.from_directory(tmp_path)
    assert "tokenizer_config.json" in str(caught.value)


def test_tokenizer_config_is_optional(tmp_path):
    make.write(tmp_path, make.byte_level())
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.from_directory(tmp_path).encode("hello")


def test_added_token_flags_are_kept():
    source = make.byte_level()
    source.add_special_tokens([AddedToken("<|strip|>", special=True, rstrip=True)])
    tokenizer = make.wrap(source, eos_token="<|strip|>")
    assert tokenizer.encode("<|strip|>   a") == [*tokenizer.eos_token_ids, *tokenizer.encode("a")]


def test_long_texts_are_encoded_and_decoded_as_short_ones():
    parts = ["héllo ", " 日本\n", "🙂", "<|im_end|>", "a  b", "\u0301"]
    long = "".join(parts[i * 7 % 11 % len(parts)] for i in range(2000))
    for tokenizer in (Tokenizer.from_directory(TINY), make.wrap(make.sentencepiece_like())):
        ids = tokenizer._tokenizer.encode(long).ids
        assert tokenizer.encode(long) == ids
        for skips in (False, True):
            text = tokenizer._tokenizer.decode(ids, skip_special_tokens=skips)
            assert tokenizer.decode(ids, skips) == text


def test_other_threads_run_while_a_long_text_is_encoded():
    tokenizer = Tokenizer.from_directory(TINY)
    text, num_turns, is_done = "hello world " * 30_000, 0, False

    def work():
        nonlocal is_done
        tokenizer.encode(text)
        is_done = True

    thread = threading.Thread(target=work)
    thread.start()
    while not is_done:
        time.sleep(0.001)
        num_turns += 1
    thread.join()
    assert num_turns > 20


def test_a_text_that_surely_has_too_many_tokens_is_not_encoded():
    tokenizer = Tokenizer.from_directory(TINY)
    longest = max(len(tokenizer.decode([i], False)) for i in range(tokenizer.vocab_size))
    assert longest <= tokenizer._most_chars
    assert len(tokenizer.encode("a" * 10 * tokenizer._most_chars, most=10)) > 10
    with pytest.raises(InvalidRequestError, match="characters, but the context holds 10") as caught:
        tokenizer.encode("a" * (10 * tokenizer._most_chars + 1), most=10)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.encode_chat([{"role": "user", "content": "a" * 10_000}], most=10)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("made", [make.word_piece, make.unigram_metaspace])
def test_a_token_that_stands_for_any_text_has_no_bound(made):
    text = "日" * 1000
    tokenizer = make.wrap(made())
    assert tokenizer.encode(text, most=2) == tokenizer.encode(text)
