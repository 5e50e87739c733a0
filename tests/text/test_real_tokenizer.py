"""The fetched checkpoint's tokenizer and chat template against transformers."""

import pytest
import transformers

from jaxserve.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import TEXTS

pytestmark = pytest.mark.real_model

CHATS = [
    [{"role": "user", "content": "What is 12 + 30?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Olá 🙂"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "x  12\n"},
    ],
]


@pytest.fixture(scope="module")
def theirs(real_model_directory):
    return transformers.PreTrainedTokenizerFast.from_pretrained(real_model_directory)


@pytest.fixture(scope="module")
def ours(real_model_directory):
    return Tokenizer.from_directory(real_model_directory)


@pytest.mark.parametrize("text", [*TEXTS, "x  12 and 3.14159", "def f(a):\n    return a\n"])
def test_text_as_transformers_does(ours, theirs, text):
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_as_transformers_does(ours, theirs, messages, prompt):
    arguments = {"add_generation_prompt": prompt}
    expected = theirs.apply_chat_template(messages, tokenize=False, **arguments)
    assert ours.render_chat(messages, **arguments) == expected
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments)
    assert ours.encode_chat(messages, **arguments) == ids


def test_digits_are_split(ours):
    # The trap of this checkpoint's source: without the digit split "12" is one token.
    assert len(ours.encode("12")) == 2


def test_named_tokens(ours):
    assert ours.eos_token_ids == (2,)
    assert (ours.bos_token, ours.bos_token_id) == ("<|im_start|>", 1)
    assert ours.vocab_size == 49152
