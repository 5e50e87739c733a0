"""Which tokens each set leaves, and that a mask is asked for exactly where one is needed."""

import numpy as np
import pytest

from jaxserve.constraints.constraint import allows, combine_masks, num_words
from jaxserve.constraints.token_sets import AllowedTokens, BadWords, MinTokens

V = 70


def left(constraints, output, vocab_size=V):
    mask = np.zeros(num_words(vocab_size), np.uint32)
    combine_masks(constraints, output, mask, vocab_size)
    return {i for i in range(vocab_size) if allows(mask, i)}


EVERY = set(range(V))


def test_allowed_tokens_leave_nothing_else_at_every_place():
    allowed = AllowedTokens((0, 31, 32, 69))
    for output in ([], [1], [1] * 100):
        assert allowed.needs_mask(len(output))
        assert left([allowed], output) == {0, 31, 32, 69}


@pytest.mark.parametrize("ids", [(3, 9), (0, 69), ()])
def test_c05_min_tokens_count_the_output_alone(ids):
    constraint = MinTokens(3, ids)
    for n in range(6):
        output = [5] * n
        assert constraint.needs_mask(n) == (n < 3)
        assert left([constraint], output) == (EVERY - set(ids) if n < 3 else EVERY)


def test_bad_words_forbid_the_last_token_behind_the_others():
    words = BadWords([(7,), (1, 2, 3), (4, 5), (1, 2, 3)])
    assert left([words], []) == EVERY - {7}
    assert left([words], [1]) == EVERY - {7}
    assert left([words], [2]) == EVERY - {7}
    assert left([words], [1, 2]) == EVERY - {7, 3}
    assert left([words], [9, 1, 2]) == EVERY - {7, 3}
    assert left([words], [1, 2, 9]) == EVERY - {7}
    assert left([words], [1, 2, 4]) == EVERY - {7, 5}


def test_bad_words_of_many_tokens_ask_for_no_mask_before_they_can_match():
    words = BadWords([(1, 2, 3), (1, 1, 2, 3)])
    assert [words.needs_mask(n) for n in range(4)] == [False, False, True, True]
    assert not any(3 not in left([words], [1][:n]) for n in range(2))
    assert BadWords([(1, 2), (8,)]).needs_mask(0)


def test_min_tokens_give_way_to_allowed_tokens_that_all_end():
    """The stronger comes first: only end ids are allowed, so the sequence ends early."""
    assert left([AllowedTokens((3, 9)), MinTokens(6, (3, 9))], []) == {3, 9}
    assert left([AllowedTokens((3, 8)), MinTokens(6, (3, 9))], []) == {8}


def test_bad_words_give_way_last():
    constraints = [AllowedTokens((3, 8)), MinTokens(6, (3,)), BadWords([(8,)])]
    assert left(constraints, []) == {8}
    assert left(constraints, [8] * 6) == {3}
