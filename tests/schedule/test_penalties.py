"""Slots of the count table: who is loaded when, and who gives way."""

import numpy as np
import pytest

from jaxserve.pages.page_table import PageTable
from jaxserve.request import Request
from jaxserve.schedule.penalties import PenaltySlots
from jaxserve.schedule.sequence import Sequence


def make_sequence(*prompt: int, output: tuple[int, ...] = ()) -> Sequence:
    seq = Sequence(
        request=Request(id="r", prompt_token_ids=prompt),
        prompt_token_ids=prompt,
        order=(0, 0),
        seed=0,
        max_tokens=100,
        stop_ids=frozenset(),
        page_table=PageTable(8, 4),
    )
    for token_id in output:
        seq.append(token_id, 0.0)
    return seq


def table_row(load, vocab_size: int = 100) -> dict[int, int]:
    row = np.zeros(vocab_size, np.int32)
    np.add.at(row, load.token_ids, load.amounts)
    return {int(i): int(row[i]) for i in np.flatnonzero(row)}


def test_a_history_counts_the_prompt_once_and_the_output_as_often_as_it_came():
    slots = PenaltySlots(2)
    seq = make_sequence(5, 6, 5, output=(6, 7, 6))
    (slot,), (load,) = slots.place([(seq, 3)], 1)
    assert load.slot == slot
    assert table_row(load) == {5: 1, 6: 1 + 4, 7: 2}
    assert slots.place([(seq, 4)], 3) == ([slot], []), "the device counted what it sampled"
    assert slots.place([(seq, 7)], 1) == ([slot], []), "three steps in one were counted"


@pytest.mark.parametrize("position", [0, 1, 2, 4])
def test_a_sequence_that_is_not_where_it_was_is_loaded_again(position):
    slots = PenaltySlots(2)
    seq = make_sequence(5, output=(6, 7, 8, 9))
    (slot,), _ = slots.place([(seq, 2)], 1)
    (again,), (load,) = slots.place([(seq, position)], 1)
    assert again == slot
    assert table_row(load) == {5: 1, **dict.fromkeys((6, 7, 8, 9)[:position], 2)}


def test_the_one_used_longest_ago_gives_way_and_nobody_of_the_step():
    slots = PenaltySlots(3)
    a, b, c, d = (make_sequence(i, output=(1, 2, 3, 4, 5)) for i in range(4))
    (slot_a, slot_b, slot_c), loads = slots.place([(a, 0), (b, 0), (c, 0)], 1)
    assert sorted([slot_a, slot_b, slot_c]) == [0, 1, 2]
    assert len(loads) == 3
    assert slots.place([(a, 1), (c, 1)], 1)[1] == []
    # b stands longest; a and c are of the step.
    (first, second, third), loads = slots.place([(d, 0), (a, 2), (c, 2)], 1)
    assert (first, second, third) == (slot_b, slot_a, slot_c)
    assert [one.slot for one in loads] == [slot_b]
    (again, _, _), loads = slots.place([(b, 1), (d, 1), (c, 3)], 1)
    assert again == slot_a
    assert [one.slot for one in loads] == [slot_a]
    assert table_row(loads[0]) == {1: 1 + 2}


def test_what_was_forgotten_is_loaded():
    slots = PenaltySlots(2)
    seq = make_sequence(5)
    slots.place([(seq, 0)], 1)
    slots.forget()
    seq.append(9, 0.0)
    _, (load,) = slots.place([(seq, 1)], 1)
    assert table_row(load) == {5: 1, 9: 2}


def test_a_token_that_only_the_device_knows_cannot_be_loaded():
    seq = make_sequence(5)
    seq.token_ids.append(-1)
    with pytest.raises(AssertionError, match="only known to the device"):
        PenaltySlots(2).place([(seq, 1)], 1)
