"""Histories reach the count table in pieces of one size; steps that await masks say so."""

import dataclasses

import numpy as np
import pytest

from jaxserve.device.row_sampler import _pieces
from jaxserve.device.step_shapes import COUNT_PIECE
from jaxserve.schedule.batch import CountLoad, DeviceBatch, LogitBias, Penalties
from tests.device.executors import Slice, make_batch, shared_executor


@pytest.mark.parametrize("size", [1, COUNT_PIECE - 1, COUNT_PIECE, COUNT_PIECE + 1, 3000])
def test_pieces_hold_a_history_and_zeros(size):
    rng = np.random.default_rng(size)
    ids = rng.integers(1, 10**5, size).astype(np.int32)
    amounts = rng.integers(1, 9, size).astype(np.int32)
    pieces = list(_pieces(CountLoad(0, ids, amounts)))
    assert len(pieces) == -(-size // COUNT_PIECE)
    for parts, whole in zip(zip(*pieces, strict=True), (ids, amounts), strict=True):
        assert {(one.shape, one.dtype.name) for one in parts} == {((COUNT_PIECE,), "int32")}
        found = np.concatenate(parts)
        np.testing.assert_array_equal(found[:size], whole)
        assert not found[size:].any()


def with_penalties(batch: DeviceBatch, slots: list[int], **loads: int) -> DeviceBatch:
    off = Penalties.off(batch.bucket.num_rows, len(batch.kv_lens))
    column = off.slots.copy()
    column[: len(slots)] = slots
    presence = np.full_like(off.presence, 0.25)
    history = np.arange(5, dtype=np.int32), np.full(5, 2, np.int32)
    return dataclasses.replace(
        batch,
        penalties=off._replace(slots=column, presence=presence),
        count_loads=tuple(CountLoad(slot, *history) for slot in loads.values()),
    )


def test_the_table_is_updated_in_place_and_counts_what_was_sampled():
    executor = shared_executor()
    executor.reset()
    sampler = executor._sampler
    where = sampler._counts.unsafe_buffer_pointer()
    batch = make_batch(Slice([7], [1]), Slice([9], [2]))
    found = executor.submit(with_penalties(batch, [3, 1], first=3, second=1)).result()
    counts = np.asarray(sampler._counts)
    for slot, (token_id,) in zip((3, 1), found.token_ids.tolist(), strict=True):
        expected = np.zeros(counts.shape[1], np.int32)
        expected[:5] = 2
        expected[token_id] += 2
        np.testing.assert_array_equal(counts[slot], expected)
    assert not counts[[0, 2]].any()
    assert sampler._counts.unsafe_buffer_pointer() == where
    executor.reset()
    assert not np.asarray(sampler._counts).any()


def test_a_step_awaits_its_masks():
    executor = shared_executor()
    slices = [Slice([7], [1]), Slice([3, 5], [2])]
    plain = executor.submit(make_batch(*slices)).result()
    batch = dataclasses.replace(make_batch(*slices), awaits_masks=True)
    step = executor.submit(batch)
    with pytest.raises(RuntimeError, match="awaits masks"):
        step.result()
    vocab_size = executor._shapes.model.config.vocab_size
    masks = np.full((2, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    first = int(plain.token_ids[0, 0])
    masks[0, first // 32] &= ~np.uint32(1 << first % 32)
    step.give_masks(masks)
    found = step.result()
    assert found.token_ids[0, 0] != first
    assert found.token_ids[1, 0] == plain.token_ids[1, 0]
    with pytest.raises(RuntimeError, match="awaits no masks"):
        step.give_masks(masks)
    single = dataclasses.replace(make_batch(Slice([7], [1])), awaits_masks=True)
    with pytest.raises(ValueError, match="no next step"):
        single.following()


def test_logprobs_are_summed_up_only_where_a_row_wants_them():
    batch = make_batch(Slice([7], [1]), Slice([3, 5], [2]))
    wanted = shared_executor().submit(batch).result()
    assert (wanted.logprobs < 0).all()
    asks = np.zeros_like(batch.wants_logprobs)
    nobody = dataclasses.replace(batch, wants_logprobs=asks)
    found = shared_executor().submit(nobody).result()
    assert np.array_equal(found.token_ids, wanted.token_ids)
    assert not found.logprobs.any()
    asks = asks.copy()
    asks[1] = True
    one = dataclasses.replace(batch, wants_logprobs=asks)
    assert np.array_equal(shared_executor().submit(one).result().logprobs, wanted.logprobs)


def test_the_arrays_of_options_are_read_only_once_they_are_in_a_batch():
    batch = make_batch(Slice([7], [1]))
    rows = batch.bucket.num_rows
    penalties, bias = Penalties.off(rows, len(batch.kv_lens)), LogitBias.off(rows)
    dataclasses.replace(batch, penalties=penalties, logit_bias=bias)
    for array in (*penalties, *bias):
        with pytest.raises(ValueError, match="read-only"):
            array[:1] = 1
