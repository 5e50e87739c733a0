"""What is prepared between two steps, and what beside them."""

from jaxserve.prepare import MAX_QUICK_BAD_WORDS, Preparer
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.tokenizer import Tokenizer
from tests.llms import TINY


def test_many_bad_words_as_texts_are_no_quick_thing():
    """Each is encoded three times, and others wait for the next step."""
    tokenizer = Tokenizer.from_directory(TINY)
    preparer = Preparer(tokenizer, eos_token_ids=tokenizer.eos_token_ids, vocab_size=512)

    def is_quick(words: list) -> bool:
        params = SamplingParams(bad_words=words)
        return preparer.is_quick(Request(id="a", prompt_token_ids=[5], sampling_params=params))

    few = [f"word {number}" for number in range(MAX_QUICK_BAD_WORDS)]
    assert is_quick([])
    assert is_quick(few + [[1, 2]] * 100)
    assert not is_quick([*few, "one more"])
