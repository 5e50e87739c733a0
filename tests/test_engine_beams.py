"""Beam search through the engine: the beams are those of a search without pages, in any pool."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.request import Request, merge_outputs
from jaxserve.sampling_params import BeamParams, SamplingParams
from tests.fakes import drain, expected_beams, expected_tokens, make_engine

PROMPT = [5, 6, 7, 8, 9]


def request(name="a", prompt=PROMPT, **fields) -> Request:
    beam = BeamParams(**({"beam_width": 3, "max_tokens": 6} | fields))
    return Request(id=name, prompt_token_ids=prompt, beam=beam)


def search(prompt, stop_ids=(), **fields) -> list[tuple[list[int], float, str]]:
    params = BeamParams(**({"beam_width": 3, "max_tokens": 6} | fields))
    return expected_beams(prompt, params, stop_ids)


def found(parts) -> list[tuple[list[int], float, str]]:
    (output,) = parts  # all at once, at the end
    assert output.finished
    assert [one.index for one in output.outputs] == list(range(len(output.outputs)))
    return [(one.token_ids, one.score, one.finish_reason) for one in output.outputs]


def stop_in(prompt, **fields) -> int:
    """A token that a search meets on its way."""
    return search(prompt, **fields)[0][0][2]


def test_beams_come_out_best_first_with_scores_and_logprobs():
    engine = make_engine()
    engine.add(request(logprobs=True, length_penalty=2.0))
    parts = drain(engine)["a"]
    assert found(parts) == search(PROMPT, length_penalty=2.0)
    scores = [one.score for one in parts[0].outputs]
    assert scores == sorted(scores, reverse=True)
    for one in parts[0].outputs:
        assert one.score == pytest.approx(sum(one.logprobs) / len(one.token_ids) ** 2.0)
    engine.add(request("b"))
    assert drain(engine)["b"][0].outputs[0].logprobs is None


def test_width_1_is_greedy():
    engine = make_engine()
    engine.add(request(beam_width=1))
    assert found(drain(engine)["a"])[0][0] == expected_tokens(PROMPT, 6)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_stop_tokens_end_hypotheses(early_stopping):
    stop = stop_in(PROMPT, max_tokens=8)
    engine = make_engine(eos_token_ids=[stop])
    fields = {"max_tokens": 8, "early_stopping": early_stopping}
    engine.add(request(**fields))
    results = found(drain(engine)["a"])
    assert results == search(PROMPT, {stop}, **fields)
    assert ("stop", stop) in {(reason, ids[-1]) for ids, _, reason in results}
    engine.add(request("ignoring", **fields, ignore_eos=True))
    assert found(drain(engine)["ignoring"]) == search(PROMPT, **fields)
    engine.add(request("own", **fields, ignore_eos=True, stop_token_ids=[stop]))
    own = drain(engine)["own"]
    assert found(own) == results
    assert {c.stop_reason for c in own[0].outputs if c.finish_reason == "stop"} == {stop}


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    beam_width=st.integers(1, 6),
    max_tokens=st.integers(1, 9),
    length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
    max_num_seqs=st.integers(1, 7),
    budget=st.integers(1, 20),
    spare_pages=st.integers(0, 30),
    num_host_pages=st.sampled_from([0, 6]),
    caching=st.booleans(),
    others=st.integers(0, 2),
)
def test_c13_beams_do_not_depend_on_the_pool(
    lengths,
    beam_width,
    max_tokens,
    length_penalty,
    max_num_seqs,
    budget,
    spare_pages,
    num_host_pages,
    caching,
    others,
):
    """Several searches and other requests at once, in any pool in which one sequence fits."""
    engine = make_engine(
        num_pages=1 + max(-(-(length + max_tokens) // 4) for length in lengths) + spare_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        num_host_pages=num_host_pages,
        enable_prefix_caching=caching,
    )
    fields = {
        "beam_width": beam_width, "max_tokens": max_tokens, "length_penalty": length_penalty
    }  # fmt: skip
    prompts = [[number] * length for number, length in enumerate(lengths)]
    for number, prompt in enumerate(prompts):
        engine.add(request(str(number), prompt, **fields))
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    for number in range(others):
        engine.add(Request(id=f"o{number}", prompt_token_ids=prompts[0], sampling_params=params))
    parts = drain(engine)
    for number, prompt in enumerate(prompts):
        assert found(parts[str(number)]) == search(prompt, **fields)
    for number in range(others):
        ids = merge_outputs(parts[f"o{number}"]).outputs[0].token_ids
        assert ids == expected_tokens(prompts[0], max_tokens)
    assert engine.stats().num_owned_pages == 0


def test_beams_compute_each_token_once():
    engine = make_engine(num_pages=200)
    prompt = list(range(30))
    engine.add(request(prompt=prompt, beam_width=4, max_tokens=10))
    drain(engine)
    # The prompt, and one token of each of the 4 beams in every step but the last.
    assert engine.executor.num_computed_tokens == 30 + 4 * 9
    assert engine.stats().num_scheduled_tokens == 30 + 4 * 9


def test_width_6_saves_a_third_of_the_pages():
    """Against beams that own a copy of all they know."""
    engine = make_engine(num_pages=200, max_num_seqs=8, max_model_len=256, page_size=16)
    engine.add(request(prompt=list(range(40)), beam_width=6, max_tokens=100))
    shared = copied = 0
    while engine.has_work():
        engine.step()
        tables = [seq.page_table.page_ids for seq in engine.scheduler.running]
        tables += [seq.page_table.page_ids for seq in engine.scheduler.parked]
        shared += engine.stats().num_owned_pages
        copied += sum(map(len, tables))
    assert 1 - shared / copied >= 0.35


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_abort_gives_the_best_so_far(num_steps):
    engine = make_engine(max_num_seqs=2)
    engine.add(request())
    for _ in range(num_steps):
        assert engine.step() == []
    output = engine.abort("a")
    assert output.finished
    assert {one.finish_reason for one in output.outputs} == {"abort"}
    assert not engine.has_work()
    engine.check_invariants()
    assert engine.stats().num_owned_pages == 0


def test_a_beam_that_is_not_finite_ends_the_search_and_nothing_else():
    bad = search(PROMPT)[0][0][3]
    engine = make_engine(poison=[bad])
    engine.add(request())
    engine.add(request("other", [1, 2, 3]))
    parts = drain(engine)
    outputs = parts["a"][0].outputs
    assert {(c.finish_reason, c.stop_reason) for c in outputs} == {("error", "non_finite_logits")}
    assert any(c.token_ids[-1] == bad for c in outputs)
    assert found(parts["other"]) == search([1, 2, 3])
    assert engine.stats().num_owned_pages == 0


BAD_PARAMS = [
    ("beam_width", 0),
    ("beam_width", 33),
    ("beam_width", True),
    ("beam_width", 2.0),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("length_penalty", float("nan")),
    ("length_penalty", 11),
    ("length_penalty", "1"),
    ("early_stopping", "always"),
    ("early_stopping", 1),
    ("early_stopping", None),
    ("stop_token_ids", [-1]),
    ("ignore_eos", 1),
    ("logprobs", 21),
]


@pytest.mark.parametrize(("name", "value"), BAD_PARAMS)
def test_a_bad_field_is_named(name, value):
    with pytest.raises(InvalidRequestError, match=name) as caught:
        BeamParams(**({"beam_width": 2} | {name: value}))
    assert caught.value.param == name


def test_what_does_not_go_together_is_refused_by_name():
    beam = BeamParams(beam_width=2, max_tokens=3)
    for params in (SamplingParams(n=2), SamplingParams(temperature=0), SamplingParams(stop="x")):
        with pytest.raises(InvalidRequestError, match="exclude each other") as caught:
            Request(id="a", prompt_token_ids=[1], sampling_params=params, beam=beam)
        assert caught.value.param == "sampling_params"
    with pytest.raises(InvalidRequestError, match="beam and hold exclude each other"):
        Request(id="a", prompt_token_ids=[1], beam=beam, hold=True)
    with pytest.raises(InvalidRequestError, match="beam must be BeamParams"):
        Request(id="a", prompt_token_ids=[1], beam=3)
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match="beam_width must be at most 31 beside 33"):
        engine.add(request(beam_width=32, stop_token_ids=range(33)))
    engine.add(request())
    engine.step()
    with pytest.raises(InvalidRequestError, match="cannot be forked"):
        engine.fork("a", "b")
    with pytest.raises(InvalidRequestError, match="index must be None for a beam search"):
        engine.abort("a", 0)
    assert found(drain(engine)["a"]) == search(PROMPT)
