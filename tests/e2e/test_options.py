"""Penalties, bias, masks and processed logprobs through the real device: exact on checkpoints whose logits
are known, and on random ones the same whatever else the engine does.
"""

import functools
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxserve.device.compile_counter import CompileCounter
from jaxserve.errors import InvalidRequestError
from jaxserve.llm import LLM
from jaxserve.request import SamplingParams
from jaxserve.sampling_params import BeamParams
from tests import numpy_llama
from tests.checkpoints import make_bigram, make_random_llama
from tests.llms import TINY, shared_llm

X, Y, VOCAB_SIZE = 10, 11, 40
NUM_TOKENS = 12
PROBS = [0.5, 0.25, 0.15, 0.06, 0.04]


@pytest.fixture(scope="module")
def c18(tmp_path_factory) -> LLM:
    """After any token X has 2.0, Y 1.5 and the rest -5."""
    logits = dict.fromkeys(range(VOCAB_SIZE), -5.0) | {X: 2.0, Y: 1.5}
    folder = tmp_path_factory.mktemp("c18")
    return shared_llm(make_bigram(folder, {}, vocab_size=VOCAB_SIZE, default=logits))


def greedy_with(num_tokens: int, **fields: object) -> SamplingParams:
    options = {"temperature": 0.0, "ignore_eos": True, "logprobs": True} | fields
    return SamplingParams(max_tokens=num_tokens, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [X, X, X]),
        ({"repetition_penalty": 1.5}, [Y, X, X]),
        ({"presence_penalty": 1.0}, [X, Y, X]),
        ({"frequency_penalty": 0.3}, [X, X, Y]),
        ({"logit_bias": {Y: 0.6}}, [Y, Y, Y]),
        ({"logit_bias": {3: 7.4, X: -100}}, [3, 3, 3]),
        ({"bad_words": [[X]]}, [Y, Y, Y]),
        ({"bad_words": [[X, X]]}, [X, Y, X]),
        ({"allowed_token_ids": [3, Y]}, [Y, Y, Y]),
        ({"min_tokens": 2, "stop_token_ids": [X]}, [Y, Y, X]),
    ],
)
def test_c18_exact_tokens(c18, fields, expected):
    (output,) = c18.generate([[X, 12]], greedy_with(3, **fields))
    assert output.outputs[0].token_ids == expected
    # What is reported is of the raw logits, whatever was done to them.
    total = np.log(np.exp([2.0, 1.5]).sum() + 38 * np.exp(-5))
    raw = {X: 2.0, Y: 1.5}
    wanted = [raw.get(i, -5.0) - total for i in expected]
    assert output.outputs[0].logprobs == pytest.approx(wanted, abs=1e-5)


def test_mixed_rows_are_those_of_each_alone(c18):
    fields = [
        {},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.3},
        {"logit_bias": {Y: 0.6}},
        {"bad_words": [[X, X]]},
        {"temperature": 1.0, "seed": 3, "frequency_penalty": 1.0},
    ]
    params = [greedy_with(8, **one) for one in fields]
    solo = [c18.generate([[X, 12]], one)[0].outputs[0] for one in params]
    rng = random.Random(1)
    for _ in range(4):
        order = rng.sample(range(len(params)), len(params))
        mixed = c18.generate([[X, 12]] * len(order), [params[i] for i in order])
        for i, output in zip(order, mixed, strict=True):
            assert output.outputs[0].token_ids == solo[i].token_ids
            assert output.outputs[0].logprobs == pytest.approx(solo[i].logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0.0}, PROBS),
        ({"temperature": 2.0}, np.sqrt(PROBS) / np.sqrt(PROBS).sum()),
        ({"temperature": 0.0, "logit_bias": {0: -100.0}}, [0, 0.5, 0.3, 0.12, 0.08]),
        ({"temperature": 0.0, "top_k": 2}, PROBS),
        ({"temperature": 1.0, "top_k": 2}, [2 / 3, 1 / 3, 0, 0, 0]),
        ({"temperature": 1.0, "bad_words": [[0], [1]]}, [0, 0, 0.6, 0.24, 0.16]),
    ],
)
def test_processed_logprobs_are_of_what_is_sampled_from(tmp_path_factory, fields, expected):
    llm = shared_llm(five_tokens(tmp_path_factory))
    params = SamplingParams(
        max_tokens=6, seed=1, ignore_eos=True, logprobs=True, processed_logprobs=True, **fields
    )
    plain = SamplingParams(max_tokens=6, temperature=2.0, seed=4, ignore_eos=True, logprobs=True)
    one, other = llm.generate([[2], [2]], [params, plain])
    (one,), (other,) = one.outputs, other.outputs
    assert one.logprobs == pytest.approx(np.log([expected[i] for i in one.token_ids]), abs=1e-4)
    raw = np.log(PROBS)
    assert other.logprobs == pytest.approx([raw[i] for i in other.token_ids], abs=1e-4)


FIVE: dict[str, Path] = {}


def five_tokens(tmp_path_factory) -> Path:
    """A checkpoint whose next token is one of five, by PROBS."""
    if "folder" not in FIVE:
        logits = dict(enumerate(np.log(PROBS).tolist()))
        FIVE["folder"] = make_bigram(
            tmp_path_factory.mktemp("five"), {}, vocab_size=5, default=logits
        )
    return FIVE["folder"]


@functools.cache
def asked() -> list[tuple[list[int], SamplingParams]]:
    """Prompts and what is asked of them: one in four is plain."""
    rng = random.Random(8)
    found = []
    for number in range(8):
        fields: dict = {"temperature": [0.0, 0.9][number % 2], "seed": number}
        if number % 4:
            fields |= {"repetition_penalty": 1.4, "frequency_penalty": 0.4}
        if number % 4 == 2:
            fields |= {"presence_penalty": 0.7, "n": 3}
        if number % 4 == 3:
            fields |= {"logit_bias": {i: rng.uniform(-5, 5) for i in rng.sample(range(512), 30)}}
        if number >= 6:
            fields |= {"bad_words": [[i] for i in rng.sample(range(512), 100)], "min_tokens": 4}
        prompt = [rng.randrange(512) for _ in range(rng.choice([3, 9, 20]))]
        found.append((prompt, greedy_with(NUM_TOKENS, **fields)))
    return found


def run_all(llm: LLM, order: Sequence[int] | None = None) -> dict[int, list]:
    order = range(len(asked())) if order is None else order
    outputs = llm.generate([asked()[i][0] for i in order], [asked()[i][1] for i in order])
    llm.engine.check_invariants()
    return {
        i: [(one.token_ids, one.logprobs) for one in output.outputs]
        for i, output in zip(order, outputs, strict=True)
    }


@functools.cache
def alone() -> dict[int, list]:
    """Each request alone, one step at a time, with pages for everything."""
    llm = shared_llm(async_scheduling=False, page_size=4)
    return {i: run_all(llm, [i])[i] for i in range(len(asked()))}


def assert_equal(found: dict[int, list], expected: dict[int, list]) -> None:
    for number, choices in expected.items():
        for (ids, logprobs), (want_ids, want) in zip(found[number], choices, strict=True):
            assert ids == want_ids, number
            assert logprobs == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("num_pages", [None, 14])
def test_options_are_the_same_whatever_the_engine_does(monkeypatch, is_async, num_steps, num_pages):
    llm = shared_llm(page_size=4, **({} if num_pages is None else {"num_pages": num_pages}))
    monkeypatch.setattr(llm.engine._loop, "async_scheduling", is_async)
    monkeypatch.setattr(llm.engine.scheduler, "num_decode_steps", num_steps)
    expected = alone()
    counter = CompileCounter()
    before = llm.engine.stats().num_preemptions
    order = random.Random(num_steps).sample(range(len(asked())), len(asked()))
    assert_equal(run_all(llm, order), expected)
    assert (llm.engine.stats().num_preemptions > before) == (num_pages is not None)
    assert counter.count == 0


def test_c46_no_option_compiles_anything():
    llm = shared_llm()
    counter = CompileCounter()
    rng = random.Random(2)
    fields = [
        {"repetition_penalty": 1.2},
        {"presence_penalty": -1.0, "frequency_penalty": 0.5, "temperature": 1.0},
        {"logit_bias": dict.fromkeys(range(300), 1.0)},
        {"allowed_token_ids": list(range(200)), "top_k": 4, "temperature": 0.5},
        {"bad_words": [[1, 2], [3]], "min_tokens": 2},
        {"processed_logprobs": True, "logprobs": 5, "temperature": 0.7},
        {"logprobs": 20},
        {"logprobs": 0, "prompt_logprobs": 3},
        {"n": 3, "temperature": 1.0, "frequency_penalty": 0.1},
    ]
    for count in (1, 2, 3, 4, 7):
        for own in fields:
            params = greedy_with(4, **({"logprobs": True} | own))
            prompts = [[rng.randrange(512)] * rng.choice([1, 5, 40]) for _ in range(count)]
            llm.generate(prompts, params)
    llm.generate([[5] * 9] * len(fields), [greedy_with(6, **one) for one in fields])
    llm.generate([list(range(100))], greedy_with(2, **fields[0]))
    llm.beam_search([[1, 2, 3]], BeamParams(beam_width=3, max_tokens=4))
    assert counter.count == 0


def padded_tokenizer() -> str:
    """The tokenizer of the tiny checkpoint, 512 tokens, for a vocabulary with more rows."""
    return (TINY / "tokenizer.json").read_text("utf-8")


def test_padded_rows_of_the_vocabulary_are_never_sampled_and_never_counted(tmp_path):
    sizes = (512, 530)
    llms = []
    for size in sizes:
        # The padded rows would win each time.
        logits = {7: 3.0, 8: 2.0} | dict.fromkeys(range(512, size), 9.0)
        folder = make_bigram(
            tmp_path / str(size),
            {},
            vocab_size=size,
            default=logits,
            tokenizer_json=padded_tokenizer(),
        )
        llms.append(shared_llm(folder))
    plain, padded = llms
    params = [
        greedy_with(4, logprobs=3),
        greedy_with(4, frequency_penalty=2.0, prompt_logprobs=2),
        greedy_with(8, temperature=9.0, seed=5),
        greedy_with(8, temperature=9.0, seed=6, processed_logprobs=True, bad_words=[[7]]),
    ]
    outputs = [llm.generate([[9, 7]] * 4, params) for llm in llms]
    for want, found in zip(*(one[:2] for one in outputs), strict=True):
        (ours,), (theirs,) = found.outputs, want.outputs
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    padding = set(range(512, 530))
    for output in outputs[1][2:]:
        assert padding.isdisjoint(output.outputs[0].token_ids)
        assert len(set(output.outputs[0].token_ids)) > 3, "drawn from nearly all"
    hot = np.exp(np.array([3.0, 2.0, *[0.0] * 510]) / 9)
    for token_id, logprob in zip(
        outputs[1][3].outputs[0].token_ids, outputs[1][3].outputs[0].logprobs, strict=True
    ):
        assert token_id != 7
        weight = hot[1] if token_id == 8 else hot[2]
        assert logprob == pytest.approx(np.log(weight / (hot.sum() - hot[0])), abs=1e-4)
    assert all(i < 512 for tops in outputs[1][0].outputs[0].top_logprobs for i, _ in tops)
    for beam in padded.beam_search([[9]], BeamParams(beam_width=3, max_tokens=3, ignore_eos=True)):
        assert all(padding.isdisjoint(one.token_ids) for one in beam.outputs)
    with pytest.raises(
        InvalidRequestError, match=r"prompt token ids must be in \[0, 512\), got 512"
    ):
        padded.generate([[512]], greedy_with(1))
    plain.generate([[511]], greedy_with(1))  # the control: the last token that there is


def test_without_a_tokenizer_no_row_is_padding(tmp_path):
    folder = make_bigram(tmp_path, {}, vocab_size=20, default={19: 1.0})
    (output,) = shared_llm(folder).generate([[19]], greedy_with(2))
    assert output.outputs[0].token_ids == [19, 19]


def test_a_random_model_with_every_penalty_is_what_numpy_says(tmp_path):
    """The whole way, by a plain loop over the full context."""
    folder = make_random_llama(tmp_path, seed=4)
    params = greedy_with(
        10, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.3, logit_bias={5: 1.5}
    )
    prompt = [3, 4, 90, 3, 7]
    ids = list(prompt)
    for _ in range(10):
        logits = numpy_llama.forward(folder, ids)[-1].astype(np.float64)
        seen = list(set(ids))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.3, logits[seen] * 1.3)
        counts = np.bincount(ids[len(prompt) :], minlength=len(logits))
        logits -= 0.2 * counts + 0.3 * (counts > 0)
        logits[5] += 1.5
        ids.append(int(np.argmax(logits)))
    (output,) = shared_llm(folder).generate([prompt], params)
    assert output.outputs[0].token_ids == ids[len(prompt) :]
