"""What a batch shares with the one before it is sent once; all else arrives as it is."""

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxserve.device.placement import DEFAULT_DEVICE
from jaxserve.device.shared_inputs import SharedInputs
from jaxserve.device.step import StillInputs
from tests.device.executors import Slice, make_batch, shared_executor


class Two(NamedTuple):
    table: Any
    ranges: Any


@pytest.fixture
def inputs(monkeypatch):
    """`SharedInputs`, and the arrays that it sent."""
    sent = []

    class Counting(type(DEFAULT_DEVICE)):
        def put(self, tree, spec=None):
            sent.append(tree)
            return jax.device_put(tree)

    return SharedInputs(Counting()), sent


def test_only_what_differs_is_sent(inputs):
    shared, sent = inputs
    table, ranges = np.arange(6, dtype=np.int32), np.array([1, 1, 2], np.int32)
    first = shared.put(Two(table, ranges))
    assert type(first) is Two
    assert len(sent) == 2
    again = shared.put(Two(table, ranges.copy()))  # the same, and one that is equal
    assert again.table is first.table
    assert again.ranges is first.ranges
    assert len(sent) == 2
    other = shared.put(Two(table, ranges + 1))
    assert other.table is first.table
    assert other.ranges.tolist() == [2, 2, 3]
    assert len(sent) == 3
    back = shared.put(Two(table[:3], ranges))  # of another length, and one of long ago
    assert back.table.tolist() == [0, 1, 2]
    assert back.ranges.tolist() == [1, 1, 2]


def test_what_differs_in_every_step_is_left_to_the_program(inputs):
    shared, sent = inputs
    table, ranges = np.arange(6, dtype=np.int32), np.array([1, 1, 2], np.int32)
    found = shared.put(Two(table, ranges), but=("ranges",))
    assert found.ranges is ranges
    assert found.table.tolist() == [0, 1, 2, 3, 4, 5]
    assert len(sent) == 1


def test_equal_values_of_another_type_are_sent(inputs):
    shared, _ = inputs
    zeros = np.zeros(3, np.int32)
    assert shared.put(Two(zeros, zeros)).table.dtype == np.int32
    assert shared.put(Two(zeros.astype(bool), zeros)).table.dtype == np.bool_


def test_batches_that_alternate_give_what_each_gives_alone():
    """Two batches of the same shapes that differ in all that is kept between steps."""
    executor = shared_executor()
    batches = [
        make_batch(Slice([4], [1]), Slice([7, 8], [2]), Slice([3, 5, 9], [3])),
        make_batch(Slice([4], [4]), Slice([6], [5]), Slice([3, 5, 9, 2], [6], samples=False)),
    ]
    one, other = map(StillInputs.of, batches)
    for name in ("page_table", "cu_q_lens", "ranges", "logit_rows"):
        assert not np.array_equal(getattr(one, name), getattr(other, name)), name

    def run(batch) -> list:
        found = executor.submit(batch).result()
        return [found.token_ids.tolist(), found.logprobs.tolist(), found.finite.tolist()]

    executor.reset()
    alone = [run(batch) for batch in batches]
    for _ in range(2):
        assert [run(batch) for batch in batches] == alone
