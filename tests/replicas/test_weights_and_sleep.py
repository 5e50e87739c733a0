"""Other weights and sleep of several engines behind one face."""

import pytest

from jaxserve.request import Request, merge_outputs
from jaxserve.sampling_params import SamplingParams
from tests.fakes import drain, expected_tokens, next_token
from tests.replicas.replicated import make_replicated, replica_of

PROMPTS = {"a": [1, 2, 3], "b": [40, 41], "c": [70, 71, 72, 73]}


def add(engine, name, num_tokens=8):
    params = SamplingParams(max_tokens=num_tokens, temperature=0)
    request = Request(id=name, prompt_token_ids=PROMPTS[name[0]], sampling_params=params)
    engine.add(request)


def steps(engine, count, parts):
    for _ in range(count):
        for output in engine.step():
            parts.setdefault(output.request_id, []).append(output)


def finish(engine, parts):
    for name, more in drain(engine).items():
        parts.setdefault(name, []).extend(more)
    return {name: merge_outputs(some).outputs[0] for name, some in parts.items()}


def check_tokens(output, prompt, weights_of):
    tokens = list(prompt)
    for token, version in zip(output.token_ids, output.weights_versions, strict=True):
        assert token == next_token([i + weights_of[version] for i in tokens])
        tokens.append(token)


def test_a_version_is_of_the_same_weights_in_every_replica():
    engine, parts = make_replicated(), {}
    add(engine, "a", 20)
    steps(engine, 4, parts)
    idle = 1 - replica_of(engine, "a")
    assert engine.update_params(5, mode="finish_old") == 1
    assert engine.engines[idle].weights_version == 1
    assert engine.weights_version == engine.stats().weights_version == 0  # of the one that lags
    assert engine.update_params(9, mode="finish_old") == 2
    for name in ("b", "c"):
        add(engine, name)
    outputs = finish(engine, parts)
    assert engine.weights_version == 2
    assert {one.executor.weights for one in engine.engines} == {9}
    check_tokens(outputs["a"], PROMPTS["a"], {0: 0})
    for name in ("b", "c"):
        check_tokens(outputs[name], PROMPTS[name], {2: 9})


def test_to_abort_all_is_to_abort_those_of_every_replica():
    engine, parts = make_replicated(), {}
    for name in PROMPTS:
        add(engine, name, 20)
    steps(engine, 3, parts)
    assert engine.update_params(5, mode="abort") == 1
    outputs = finish(engine, parts)
    assert {outputs[name].finish_reason for name in PROMPTS} == {"abort"}


def test_all_of_them_sleep_and_wake():
    engine, parts = make_replicated(), {}
    for name in PROMPTS:
        add(engine, name, 12)
    steps(engine, 4, parts)
    engine.sleep(level=2)
    assert engine.is_asleep
    assert engine.stats().is_asleep
    assert all(len(one.executor.slots) == 0 for one in engine.engines)
    while engine.has_work():  # what was released before
        steps(engine, 1, parts)
    with pytest.raises(RuntimeError, match="it sleeps"):
        engine.step()
    add(engine, "a new one")
    assert engine.update_params(0) == 1
    engine.wake()
    outputs = finish(engine, parts)
    for name, prompt in PROMPTS.items():
        assert outputs[name].token_ids == expected_tokens(prompt, 12)
    assert outputs["a new one"].token_ids == expected_tokens(PROMPTS["a"], 8)
