"""The bits of masks, and how several constraints become one."""

from collections.abc import Sequence

import numpy as np
import pytest

from jaxserve.constraints.constraint import (
    allow_only,
    allows,
    clear_ids,
    combine_masks,
    ids_mask,
    num_words,
)


def ones(vocab_size: int) -> np.ndarray:
    return np.full(num_words(vocab_size), 0xFFFFFFFF, np.uint32)


def allowed(mask: np.ndarray, vocab_size: int) -> list[int]:
    return [i for i in range(vocab_size) if allows(mask, i)]


class Only:
    """Allows some tokens, from an output position on."""

    def __init__(self, *token_ids: int, begin: int = 0):
        self.token_ids, self.begin = token_ids, begin
        self.seen: list[list[int]] = []

    def needs_mask(self, num_output_tokens: int) -> bool:
        return num_output_tokens >= self.begin

    def fill(self, output_token_ids: Sequence[int], mask: np.ndarray) -> None:
        assert (mask == 0xFFFFFFFF).all(), "a mask arrives all ones"
        self.seen.append(list(output_token_ids))
        allow_only(mask, self.token_ids)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 100])
def test_words_and_ids(vocab_size):
    assert num_words(vocab_size) == -(-vocab_size // 32)
    mask = ids_mask(num_words(vocab_size) + 1, vocab_size)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert bits.sum() == vocab_size
    assert bits[:vocab_size].all()


def test_clearing_ids_that_share_a_word_and_come_twice():
    mask = ones(100)
    clear_ids(mask, [0, 1, 31, 32, 99, 1])
    assert allowed(mask, 100) == [i for i in range(100) if i not in (0, 1, 31, 32, 99)]
    clear_ids(mask, [])
    clear_ids(mask, [1])  # cleared already
    clear_ids(mask, [128, 10**9])  # no bits of this mask
    assert not allows(mask, 1)
    assert allows(mask, 2)


def test_allowing_only_some():
    mask = ones(100)
    clear_ids(mask, [31])
    allow_only(mask, (i for i in (3, 31, 64, 64, 99, 128, 10**9)))
    assert allowed(mask, 100) == [3, 64, 99]
    allow_only(mask, [])
    assert not mask.any()


def test_constraints_are_anded_and_one_that_leaves_nothing_gives_way():
    mask = np.zeros(num_words(70), np.uint32)
    combine_masks([Only(1, 2, 40), Only(2, 40, 65)], [], mask, 70)
    assert allowed(mask, 70) == [2, 40]
    combine_masks([Only(1, 2), Only(3), Only(2, 3)], [], mask, 70)
    assert allowed(mask, 70) == [2], "the weaker one gave way, the next still counts"


def test_ids_outside_the_vocabulary_count_as_nothing():
    mask = np.zeros(num_words(70), np.uint32)
    combine_masks([Only(70, 95)], [], mask, 70)
    assert allowed(mask, 96) == list(range(70))


def test_constraints_that_need_no_mask_are_not_asked():
    early, late = Only(1), Only(2, begin=2)
    mask = np.zeros(num_words(10), np.uint32)
    combine_masks([late, early], [5], mask, 10)
    assert allowed(mask, 10) == [1]
    assert late.seen == []
    combine_masks([late, early], [5, 6], mask, 10)
    assert allowed(mask, 10) == [2]
    assert late.seen == [[5, 6]]
