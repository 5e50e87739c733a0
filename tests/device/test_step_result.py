"""What a step returns besides tokens: which slices are finite, and the likeliest tokens."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device import step_result
from jaxserve.device.row_programs import RawLogits, Told, head, sample_rows, sampling_rows
from jaxserve.device.row_sampler import RowOutputs
from jaxserve.device.scoring import SCORE_ROWS, ScoredBlock
from jaxserve.device.step import finite_slices
from jaxserve.device.step_result import sampled_tokens
from jaxserve.sample.logprobs import TargetScores
from jaxserve.schedule.batch import DeviceBatch
from jaxserve.schedule.buckets import Bucket
from jaxserve.weights.loader import load_params, open_checkpoint
from tests import numpy_llama
from tests.device.executors import (
    BUCKETS,
    TINY,
    Slice,
    make_batch,
    shared_executor,
    untied_checkpoint,
    update_params,
)

BAD = 40  # the token whose embedding is spoiled


@pytest.fixture(params=["auto", "int8"])
def spoiled(request):
    """An executor whose embedding of BAD is NaN; int8 pages hold no NaN that would pass it on."""
    executor = shared_executor(untied_checkpoint(), request.param)
    params, _ = load_params(open_checkpoint(untied_checkpoint()), np.dtype(np.float32))
    embedding = params["embed"]["embedding"].copy()
    embedding[BAD] = np.nan
    update_params(executor, {**params, "embed": {"embedding": embedding}})
    executor.reset()
    yield executor
    update_params(executor, params)


SLICES = [
    Slice([7], [1]),
    Slice([11], [2], samples=False),  # the middle of a prompt
    Slice([3, 5, 9], [3], samples=False),
    Slice([4, 6, 8, 10], [4]),
]


def submit(executor, *slices):
    return executor.submit(make_batch(*slices)).result()


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_nan_marks_its_own_slice_alone(spoiled, row, place):
    plain = submit(spoiled, *SLICES)
    assert plain.finite.tolist() == [True] * 4
    ids = list(SLICES[row].ids)
    ids[0 if place == "first" else -1] = BAD
    slices = [one._replace(ids=ids) if i == row else one for i, one in enumerate(SLICES)]
    found = submit(spoiled, *slices)
    assert found.finite.tolist() == [i != row for i in range(4)]
    for sampled, owner in enumerate([0, 3]):
        if owner != row:
            assert found.token_ids[sampled] == plain.token_ids[sampled]
            assert found.logprobs[sampled] == plain.logprobs[sampled]
        assert 0 <= found.token_ids[sampled, 0] < 96


def test_what_a_nan_left_in_a_page_stays_there(spoiled):
    """The page of a sequence that ended so is another's next: its old contents do not matter."""
    plain = submit(spoiled, *SLICES)
    submit(spoiled, Slice([BAD] * 4, [4], samples=False))
    again = submit(spoiled, *SLICES)
    assert again.finite.all()
    np.testing.assert_array_equal(again.token_ids, plain.token_ids)
    np.testing.assert_array_equal(again.logprobs, plain.logprobs)


def test_slices_are_told_apart_by_their_tokens():
    x = np.zeros((8, 3), np.float32)
    ends = jnp.array([0, 1, 3, 6, 6], jnp.int32)  # the last is padding, and so are tokens 6 and 7
    assert finite_slices(jnp.asarray(x), ends).tolist() == [True] * 4
    for token, slices in enumerate([[0], [1], [1], [2], [2], [2], [], []]):
        for bad in (np.nan, np.inf, -np.inf):
            spoiled = x.copy()
            spoiled[token, token % 3] = bad
            found = finite_slices(jnp.asarray(spoiled), ends)
            assert found.tolist() == [i not in slices for i in range(4)]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 3}])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, "all NaN"])
def test_logits_that_are_not_finite_mark_their_row_alone(options, bad):
    model = types.SimpleNamespace(logits=lambda head, hidden: hidden)
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 30)).astype(np.float32)
    logits[0, 20:] = -1e30  # a mask
    batch = dataclasses.replace(
        make_batch(),
        **{k: np.full(4, v, np.int32 if k == "top_k" else np.float32) for k, v in options.items()},
    )
    slices_finite = np.array([True, False, True, True, False])
    run_head = jax.jit(functools.partial(head, model, 4, 30, {}))  # type: ignore[arg-type]
    run_sample = jax.jit(sample_rows)

    def run(logits) -> tuple[RawLogits, Told]:
        raw = run_head(logits)
        rows = sampling_rows(batch)
        sampled = run_sample(raw.logits, raw.logits, raw.finite, slices_finite, rows)
        told = Told.read(np.asarray(sampled.told), 4)
        assert np.array_equal(told.token_ids, sampled.token_ids)
        assert sampled.last_ids.tolist() == [*told.token_ids, 0]
        assert np.array_equal(told.rows_finite, raw.finite)
        assert np.array_equal(told.slices_finite, slices_finite)
        return raw, told

    plain_raw, plain = run(logits)
    assert plain_raw.finite.tolist() == [True] * 4
    logits[2, :: 1 if bad == "all NaN" else 7] = np.nan if bad == "all NaN" else bad
    raw, found = run(logits)
    assert raw.finite.tolist() == [True, True, False, True]
    assert 0 <= int(found.token_ids[2]) < 30
    for name in ("token_ids", "logprobs"):
        one, other = (np.delete(np.asarray(getattr(x, name)), 2) for x in (plain, found))
        np.testing.assert_array_equal(one, other)


def test_a_row_belongs_to_the_slice_that_holds_its_token():
    batch = make_batch(*SLICES[:2], Slice([9], [3]), SLICES[3])
    assert batch.logit_rows[:3].tolist() == [0, 2, 6]
    slices_finite = np.ones(4, bool)

    def outputs(rows_finite: np.ndarray) -> RowOutputs:
        parts = [3, 9, 5, 0], [0] * 4, rows_finite, slices_finite
        return RowOutputs(np.concatenate(parts).astype(np.int32), None)

    for bad, slice_at_fault in ((0, 0), (1, 2), (2, 3)):
        found = sampled_tokens(batch, None, outputs(np.arange(4) != bad))
        assert found.finite.tolist() == [i != slice_at_fault for i in range(4)]
        assert found.token_ids.tolist() == [[3], [9], [5]]
        assert found.num_tokens.tolist() == [1, 1, 1]
    slices_finite = np.array([True, False, True, True])
    found = sampled_tokens(batch, None, outputs(np.arange(4) < 3))
    assert found.finite.tolist() == slices_finite.tolist()  # row 3 is padding


def test_the_host_leaves_the_core_of_the_kernels_once_it_has_the_result(monkeypatch):
    executor, happened, fetch = shared_executor(TINY, "auto"), [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: happened.append("fetched") or fetch(tree))
    monkeypatch.setattr(step_result, "step_aside", lambda: happened.append("left"))
    submit(executor, Slice([7], [1]))
    assert happened == ["fetched", "left"]


def test_a_step_that_samples_nothing_says_what_is_finite():
    found = submit(shared_executor(), Slice([1, 2], [1], samples=False))
    assert found.finite.tolist() == [True]
    assert found.token_ids.shape == found.logprobs.shape == (0, 1)
    assert found.num_tokens.shape == (0,)
    assert found.candidate_ids is None


@pytest.mark.parametrize("model", [TINY, untied_checkpoint()])
def test_candidates_are_the_likeliest_tokens_by_the_oracle(model):
    prompts = [[7], [3, 5, 9, 60], [8] * 6]
    slices = [Slice(ids, [1 + 2 * i, 2 + 2 * i]) for i, ids in enumerate(prompts)]
    executor = shared_executor(model)
    found = executor.submit(make_batch(*slices, wants_candidates=True)).result()
    assert found.candidate_ids is not None
    assert found.candidate_logprobs is not None
    assert found.candidate_ids.shape == found.candidate_logprobs.shape == (3, 1, 64)
    for row, prompt in enumerate(prompts):
        expected = numpy_llama.log_softmax(numpy_llama.forward(model, prompt)[-1])
        ids, logprobs = found.candidate_ids[row, 0], found.candidate_logprobs[row, 0]
        assert len(set(ids.tolist())) == 64
        np.testing.assert_allclose(logprobs, np.sort(expected)[::-1][:64], atol=1e-3)
        np.testing.assert_allclose(logprobs, expected[ids], atol=1e-3)
    np.testing.assert_array_equal(found.candidate_ids[:, :, 0], found.token_ids)
    np.testing.assert_array_equal(found.candidate_logprobs[:, :, 0], found.logprobs)
    unasked = executor.submit(make_batch(*slices)).result()
    assert unasked.candidate_ids is None
    np.testing.assert_array_equal(unasked.token_ids, found.token_ids)


def test_a_scored_row_that_is_not_finite_marks_the_slice_that_holds_it():
    """Of two blocks; what pads the second one counts for nothing."""
    batch = dataclasses.replace(
        DeviceBatch.padding(Bucket(256, 1), BUCKETS, 4, num_rows=0),
        cu_q_lens=np.array([0, 70, 100, 100, 100], np.int32),
        ranges=np.array([0, 0, 2], np.int32),
        score_rows=np.arange(10, 95, dtype=np.int32),
        score_targets=np.zeros(85, np.int32),
    )
    for bad, slice_at_fault in ((3, 0), (59, 0), (60, 1), (84, 1), (85, None), (127, None)):
        finite = (np.arange(2 * SCORE_ROWS) != bad).reshape(2, SCORE_ROWS)
        values = np.arange(2 * SCORE_ROWS, dtype=np.float32).reshape(2, SCORE_ROWS)
        blocks = [
            ScoredBlock(TargetScores(-x, x.astype(np.int32)), ok)
            for x, ok in zip(values, finite, strict=True)
        ]
        found = sampled_tokens(batch, np.ones(4, bool), None, blocks)
        assert found.finite.tolist() == [slice_at_fault != 0, slice_at_fault != 1]
        assert found.scores is not None
        assert found.scores.logprobs.tolist() == [-float(x) for x in range(85)]
        assert found.scores.ranks.tolist() == list(range(85))
        assert found.scores.top_ids is None
