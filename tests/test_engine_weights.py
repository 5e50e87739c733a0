"""Other weights under requests in flight: who ends with which of them, and what each token says of it.

The fake device shifts every token of the context by its weights, so that tokens tell what made them.
"""

import pytest

from jaxserve.errors import ConfigError
from jaxserve.request import Request, merge_outputs
from jaxserve.sampling_params import BeamParams, SamplingParams
from jaxserve.weights_switch import UPDATE_MODES
from tests.fakes import drain, expected_beams, fake_score, make_engine, next_token

PROMPT = list(range(10))
BOTH_LOOPS = pytest.mark.parametrize("is_async", [False, True], ids=["alone", "ahead"])


def add(engine, name, prompt=PROMPT, num_tokens=8, **fields):
    params = SamplingParams(max_tokens=num_tokens, temperature=0, **fields)
    engine.add(Request(id=name, prompt_token_ids=prompt, sampling_params=params))


def said_by(weights, prompt=PROMPT, num_tokens=8):
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token([i + weights for i in tokens]))
    return tokens[len(prompt) :]


def collect(parts, outputs):
    for output in outputs:
        parts.setdefault(output.request_id, []).append(output)


def steps(engine, count, parts):
    for _ in range(count):
        collect(parts, engine.step())
        engine.check_invariants()


def finish(engine, parts):
    for more in drain(engine).values():
        collect(parts, more)
    return {name: merge_outputs(some).outputs for name, some in parts.items()}


@BOTH_LOOPS
def test_each_token_says_which_weights_sampled_it(is_async):
    engine = make_engine(async_scheduling=is_async)
    add(engine, "a")
    add(engine, "several", n=3)
    parts = {}
    steps(engine, 3, parts)
    assert engine.update_params(5) == engine.weights_version == 1
    steps(engine, 2, parts)
    assert engine.update_params(9) == 2
    add(engine, "new")
    outputs = finish(engine, parts)
    for name in ("a", "several"):
        for one in outputs[name]:
            versions = one.weights_versions
            assert len(versions) == len(one.token_ids) == 8
            assert versions == sorted(versions)
            assert set(versions) == {0, 1, 2} or one.index > 0  # who were forked later
            tokens = list(PROMPT)
            for token, version in zip(one.token_ids, versions, strict=True):
                assert token == next_token([i + (0, 5, 9)[version] for i in tokens])
                tokens.append(token)
    assert outputs["new"][0].weights_versions == [2] * 8


@BOTH_LOOPS
def test_those_in_flight_end_with_the_old_weights_while_new_ones_wait(is_async):
    engine = make_engine(async_scheduling=is_async)
    add(engine, "short", num_tokens=4)
    add(engine, "long")
    parts = {}
    steps(engine, 2, parts)
    assert engine.update_params(5, mode="finish_old") == 1
    add(engine, "new")
    engine.fork("long", "branch", num_tokens=len(PROMPT))
    while engine.has_request("long"):
        assert engine.weights_version == 0
        assert engine.executor.weights == 0
        assert "new" not in parts
        steps(engine, 1, parts)
    # The last of them has ended: the old weights are gone at once, asked for or not.
    assert engine.weights_version == 1
    assert engine.executor.weights == 5
    outputs = finish(engine, parts)
    assert outputs["long"][0].token_ids == said_by(0)
    assert outputs["long"][0].weights_versions == [0] * 8
    for name in ("new", "branch"):
        assert outputs[name][0].token_ids == said_by(5)
        assert outputs[name][0].weights_versions == [1] * 8


@pytest.mark.parametrize("admission", ["fcfs", "priority", "lpm", "short_first"])
def test_nobody_passes_those_who_are_to_end_first(admission):
    engine = make_engine(admission=admission, max_num_seqs=1, num_pages=12)
    for name in ("a", "b"):
        add(engine, name, num_tokens=5)
    parts = {}
    steps(engine, 1, parts)
    engine.update_params(5, mode="finish_old")
    params = SamplingParams(max_tokens=5, temperature=0)
    engine.add(Request(id="c", prompt_token_ids=[1], sampling_params=params, priority=-9))
    outputs = finish(engine, parts)
    assert [outputs[name][0].token_ids for name in "ab"] == [said_by(0, num_tokens=5)] * 2
    assert outputs["c"][0].token_ids == said_by(5, [1], 5)


def test_weights_wait_for_nobody_where_nobody_is_in_flight():
    engine = make_engine()
    add(engine, "held", num_tokens=2)
    drain(engine)
    engine.update_params(5, mode="finish_old")
    assert (engine.weights_version, engine.executor.weights) == (1, 5)


def test_to_end_the_last_of_them_lets_the_weights_in():
    engine = make_engine()
    add(engine, "a")
    parts = {}
    steps(engine, 2, parts)
    engine.update_params(5, mode="finish_old")
    add(engine, "new")
    engine.abort("a")
    assert engine.executor.weights == 5
    assert finish(engine, {})["new"][0].token_ids == said_by(5)


@pytest.mark.parametrize("mode", UPDATE_MODES)
def test_the_last_weights_win_and_a_version_means_one_set_of_them(mode):
    engine = make_engine()
    add(engine, "a")
    parts = {}
    steps(engine, 2, parts)
    assert engine.update_params(5, mode="finish_old") == 1
    add(engine, "waits")
    assert engine.update_params(9, mode=mode) == 2
    outputs = finish(engine, parts)
    assert engine.executor.weights == 9
    old, waits = outputs["a"][0], outputs["waits"][0]
    if mode == "abort":
        assert (old.finish_reason, waits.finish_reason) == ("abort", "abort")
        return
    assert waits.token_ids == said_by(9)
    assert waits.weights_versions == [2] * 8
    assert set(old.weights_versions) == ({0} if mode == "finish_old" else {0, 2})


@BOTH_LOOPS
def test_abort_ends_all_in_flight_and_hands_their_outputs_out(is_async):
    engine = make_engine(async_scheduling=is_async)
    add(engine, "a", n=2)
    engine.add(
        Request(id="beams", prompt_token_ids=PROMPT, beam=BeamParams(beam_width=3, max_tokens=6))
    )
    parts = {}
    steps(engine, 3, parts)
    add(engine, "waits")
    engine.update_params(5, mode="abort")
    assert engine.has_work()
    assert not engine.scheduler.has_work()
    add(engine, "new")
    outputs = finish(engine, parts)
    for name in ("a", "beams", "waits"):
        assert {one.finish_reason for one in outputs[name]} == {"abort"}
    assert outputs["a"][0].token_ids == said_by(0)[: len(outputs["a"][0].token_ids)] != []
    assert outputs["new"][0].token_ids == said_by(5)
    assert engine.stats().num_output_tokens == sum(
        len(one.token_ids) for several in outputs.values() for one in several
    )


@pytest.mark.parametrize("count", range(1, 6))
def test_tokens_of_beams_are_of_one_version_each(count):
    """Beams that had their candidates of the old weights while others lagged compute them again."""
    engine = make_engine(max_num_seqs=2, num_pages=20)
    beam = BeamParams(beam_width=3, max_tokens=6, ignore_eos=True)
    engine.add(Request(id="beams", prompt_token_ids=PROMPT, beam=beam))
    parts = {}
    steps(engine, count, parts)
    engine.update_params(5)
    engine.check_invariants()
    for one in finish(engine, parts)["beams"]:
        assert one.weights_versions == sorted(one.weights_versions)
        assert len(one.weights_versions) == len(one.token_ids) == 6
        assert set(one.weights_versions) <= {0, 1}
        assert one.weights_versions[-1] == 1
    fresh = make_engine(max_num_seqs=2, num_pages=20)
    fresh.add(Request(id="beams", prompt_token_ids=PROMPT, beam=beam))
    control = finish(fresh, {})["beams"]
    assert [one.token_ids for one in control] == [ids for ids, *_ in expected_beams(PROMPT, beam)]
    assert control[0].weights_versions == [0] * 6


def test_scores_of_a_prompt_are_all_of_the_same_weights():
    prompt = list(range(40))
    engine = make_engine(max_num_batched_tokens=8)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    engine.add(Request(id="a", prompt_token_ids=prompt, sampling_params=params))
    parts = {}
    steps(engine, 3, parts)
    engine.update_params(5)
    output = merge_outputs(parts.get("a", []) + drain(engine)["a"])
    shifted = [i + 5 for i in prompt]
    assert [one.logprob for one in output.prompt_logprobs[1:]] == pytest.approx(
        [fake_score(shifted[:i], prompt[i])[0] for i in range(1, 40)]
    )


def test_no_such_mode():
    engine = make_engine()
    with pytest.raises(
        ConfigError, match="mode must be one of continue, finish_old, abort, got 'now'"
    ):
        engine.update_params(1, mode="now")
    assert engine.weights_version == 0


def test_observers_are_told_when_weights_take_over_not_when_they_are_given():
    engine = make_engine()
    told = []

    class Observer:
        def step_done(self, step):
            del step

        def weights_changed(self):
            told.append(engine.weights_version)

    engine.observers.append(Observer())
    add(engine, "a")
    engine.step()
    engine.update_params(5, mode="finish_old")
    assert told == []
    drain(engine)
    assert told == [1]
