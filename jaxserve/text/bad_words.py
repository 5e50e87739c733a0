"""Bad words as token ids. Called by `LLM` for requests that name them as texts."""

from collections.abc import Iterable, Sequence

from jaxserve.errors import InvalidRequestError, shown
from jaxserve.text.tokenizer import Tokenizer


def bad_word_ids(
    tokenizer: Tokenizer, words: Iterable[str | Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """The runs of ids that stand for bad words.

    A text is forbidden as the tokenizer writes it, at the beginning of a text and behind a space. The
    same letters in other pieces are not found: models seldom write them so.

    Args:
        tokenizer: of the model.
        words: texts, and runs of ids, which stay as they are.

    Raises:
        InvalidRequestError: the tokenizer makes no token of a text.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        bare = word.lstrip() or word
        for text in (word, bare, f" {bare}"):
            ids = tokenizer.encode(text, add_special_tokens=False, param="bad_words")
            if not ids:
                raise InvalidRequestError(
                    f"bad_words must be texts of at least one token, got {shown(word)}",
                    param="bad_words",
                )
            found[tuple(ids)] = None
    return tuple(found)
