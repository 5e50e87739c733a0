"""Beam search as arithmetic, against transformers and against looking at every sequence there is."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling_params import BeamParams
from jaxserve.schedule.beam import BeamSearch, path_tokens
from jaxserve.schedule.sequence import Candidates
from jaxserve.weights.loader import open_checkpoint
from tests import checkpoints, numpy_llama

ORACLE = json.loads((Path(__file__).parent.parent / "oracles" / "beams.json").read_text("utf-8"))


def candidates(logprobs: np.ndarray) -> Candidates:
    """All tokens, best first. f32[V]"""
    order = np.argsort(-logprobs, kind="stable").astype(np.int32)
    return Candidates(order, logprobs[order].astype(np.float32))


def run(search: BeamSearch, logprobs_after) -> BeamSearch:
    """To its end, with `logprobs_after(output token ids)` for a model."""
    while not search.is_done:
        known = [path_tokens(beam.path)[0] for beam in search.beams]
        search, extensions = search.advance([candidates(logprobs_after(ids)) for ids in known])
        assert len(extensions) == len(search.beams)
        for beam, one in zip(search.beams, extensions, strict=True):
            ids, logprobs = path_tokens(beam.path)
            assert ids == [*known[one.parent], one.token_id]
            assert beam.sum_logprob == pytest.approx(sum(logprobs))
        scores = [one.score for one in search.hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert max(len(search.beams), len(scores)) <= search.params.beam_width
    return search


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = checkpoints.make_random_llama(tmp_path_factory.mktemp("m"), **ORACLE["checkpoint"])
    checkpoint = open_checkpoint(folder)
    return checkpoint.config, dict(checkpoint.tensors())


@pytest.mark.parametrize("number", range(len(ORACLE["cases"])))
def test_c25_hypotheses_and_scores_equal_transformers(model, number):
    case = ORACLE["cases"][number]
    options = case["options"]
    params = BeamParams(
        beam_width=options["num_beams"],
        length_penalty=options["length_penalty"],
        early_stopping=options["early_stopping"],
    )
    search = BeamSearch(
        params=params, stop_ids=case["eos_token_ids"], max_tokens=options["max_new_tokens"]
    )

    def logprobs_after(ids):
        return numpy_llama.log_softmax(numpy_llama.forward(model, case["prompt"] + ids)[-1])

    found = run(search, logprobs_after)
    assert [path_tokens(one.path)[0] for one in found.hypotheses] == case["outputs"]
    np.testing.assert_allclose([h.score for h in found.hypotheses], case["scores"], rtol=1e-5)


def test_the_cases_of_transformers_tell_rules_apart():
    """Else the test above would pass with a rule missing."""
    stopping = [case["options"]["early_stopping"] for case in ORACLE["cases"]]
    assert {True, False, "never"} == set(stopping)
    ended = [
        ids[-1] in case["eos_token_ids"] for case in ORACLE["cases"] for ids in case["outputs"]
    ]
    assert 10 < sum(ended) < len(ended) - 10


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    stop_ids=st.sets(st.integers(0, 3), max_size=2),
    max_tokens=st.integers(1, 3),
    length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
)
def test_a_beam_wide_enough_finds_the_best_of_all_sequences(
    seed, stop_ids, max_tokens, length_penalty
):
    """4 tokens, at most 3 of them: a search that drops nothing is exhaustive, if it does not stop
    early by a heuristic."""
    rng = np.random.default_rng(seed)
    table = {
        ids: np.log(rng.dirichlet(np.full(4, 0.5)) + 1e-6)
        for n in range(max_tokens)
        for ids in itertools.product(range(4), repeat=n)
    }
    params = BeamParams(beam_width=32, length_penalty=length_penalty, early_stopping="never")
    search = BeamSearch(params=params, stop_ids=stop_ids, max_tokens=max_tokens)
    found = run(search, lambda ids: table[tuple(ids)])
    scores = {}
    for n in range(1, max_tokens + 1):
        for ids in itertools.product(range(4), repeat=n):
            if any(i in stop_ids for i in ids[:-1]):
                continue
            if ids[-1] in stop_ids or n == max_tokens:
                total = sum(np.float32(table[ids[:k]][ids[k]]) for k in range(n))
                scores[ids] = total / n**length_penalty
    best = sorted(scores.values(), reverse=True)[:32]
    kept = [one.score for one in found.hypotheses]
    assert kept[0] == pytest.approx(best[0], rel=1e-5)
    if len(scores) <= 32:
        np.testing.assert_allclose(kept, best, rtol=1e-5)


def test_c25_the_score_counts_generated_tokens_and_the_end():
    """The prompt has no part in it: 3, end (e^-1 each) against 4, 5, 6, 7, 8, end (e^-.75 each)."""
    end = 1
    after = {(): {3: -1.0, 4: -0.75}, (3,): {end: -1.0}}
    chain = (4, 5, 6, 7, 8, end)
    after |= {chain[:n]: {chain[n]: -0.75} for n in range(1, 6)}

    def logprobs_after(ids):
        row = np.full(72, -8.0)
        for token_id, logprob in after.get(tuple(ids), {}).items():
            row[token_id] = logprob
        return row

    for penalty, ids, score in [
        (1.0, list(chain), -0.75),
        (2.0, list(chain), -0.125),
        (0.0, [3, end], -2.0),
    ]:
        params = BeamParams(beam_width=2, length_penalty=penalty)
        search = BeamSearch(params=params, stop_ids={end}, max_tokens=20)
        best = run(search, logprobs_after).hypotheses[0]
        assert (path_tokens(best.path)[0], best.finish_reason) == (ids, "stop")
        assert best.score == pytest.approx(score)


def flat(_ids):
    return np.log(np.arange(10, 0, -1) / 55)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_a_search_ends_at_max_tokens_with_as_many_hypotheses_as_beams(early_stopping):
    params = BeamParams(beam_width=3, early_stopping=early_stopping)
    found = run(BeamSearch(params=params, stop_ids=(), max_tokens=4), flat)
    assert [one.finish_reason for one in found.hypotheses] == ["length"] * 3
    assert {len(path_tokens(one.path)[0]) for one in found.hypotheses} == {4}


def test_an_end_token_counts_only_among_the_best():
    """The fourth best continuation of all is no hypothesis of a search of width 3."""
    params = BeamParams(beam_width=3)
    for end, num_hypotheses in ((2, 1), (3, 0)):
        search = BeamSearch(params=params, stop_ids={end}, max_tokens=4)
        search, _ = search.advance([candidates(flat([]))])
        assert len(search.hypotheses) == num_hypotheses
        assert len(search.beams) == 3  # always so many that have not ended


def test_a_vocabulary_smaller_than_the_beam_gives_fewer_beams():
    params = BeamParams(beam_width=8, max_tokens=2)
    search = BeamSearch(params=params, stop_ids={0}, max_tokens=2)
    row = np.log(np.array([0.5, 0.3, 0.2]))
    search, extensions = search.advance([candidates(row)])
    assert [one.token_id for one in extensions] == [1, 2]
    search, _ = search.advance([candidates(row)] * 2)
    assert search.is_done
    assert len(search.hypotheses) == 7  # 0, and 1 or 2 before each of the three


def test_no_more_candidates_are_looked_at_than_can_matter():
    rng = np.random.default_rng(0)
    params = BeamParams(beam_width=3)
    whole = narrow = BeamSearch(params=params, stop_ids={0, 1}, max_tokens=9)
    assert whole.num_candidates == 5
    while not whole.is_done:
        rows = [np.log(rng.dirichlet(np.ones(30))) for _ in whole.beams]
        every = [candidates(row) for row in rows]
        whole, _ = whole.advance(every)
        narrow, _ = narrow.advance([Candidates(c.token_ids[:5], c.logprobs[:5]) for c in every])
        assert narrow.beams == whole.beams
        assert narrow.hypotheses == whole.hypotheses


def test_giving_up_ranks_what_runs_among_what_has_ended():
    params = BeamParams(beam_width=2)
    search = BeamSearch(params=params, stop_ids={1}, max_tokens=9)
    assert [one.path for one in search.give_up("abort").hypotheses] == [None]
    search, _ = search.advance([candidates(flat([]))])
    given_up = search.give_up("abort")
    assert given_up.is_done
    assert [(h.finish_reason, path_tokens(h.path)[0]) for h in given_up.hypotheses] == [
        ("abort", [0]),
        ("stop", [1]),
    ]
