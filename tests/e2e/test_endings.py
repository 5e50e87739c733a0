"""What ends a text, and that ids, text, logprobs and counts end in the same place: on models that say a
fixed text, one step at a time, ahead of their results and several tokens a step.
"""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from tokenizers import AddedToken

from jaxserve.errors import InvalidRequestError
from jaxserve.llm import LLM
from jaxserve.request import merge_outputs
from jaxserve.sampling_params import BeamParams
from tests.checkpoints import make_bigram, make_script
from tests.e2e.test_text import SMALL, byte_level_tokenizer
from tests.llms import greedy, stream_all

WAYS = {
    "one by one": {"async_scheduling": False},
    "ahead": {"async_scheduling": True},
    "four a step": {"async_scheduling": False, "num_decode_steps": 4},
    "four a step, ahead": {"async_scheduling": True, "num_decode_steps": 4},
}
WORDS = [f"w{i} " for i in range(12)]
VOCAB_SIZE = 320


def tokenizer_with_special(words):
    tokenizer, ids = byte_level_tokenizer(words)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer, [ids[word] for word in words], tokenizer.token_to_id("<|end|>")


@pytest.fixture(scope="module")
def hello(tmp_path_factory):
    """Says "he", "llo", then a special token, then "more"."""
    tokenizer, (he, llo, more), end = tokenizer_with_special(["he", "llo", "more"])
    path = make_script(
        tmp_path_factory.mktemp("hello"),
        [he, llo, end, more],
        vocab_size=tokenizer.get_vocab_size(),
        tokenizer_json=tokenizer.to_str(),
    )
    return LLM(str(path), **SMALL), (he, llo, end, more)


@pytest.mark.parametrize(
    ("skip", "include", "text"),
    [
        (True, False, "hello"),
        (True, True, "hello"),
        (False, False, "hello"),
        (False, True, "hello<|end|>"),
    ],
)
def test_c03_a_stop_token_chops_no_text(hello, skip, include, text):
    llm, (he, llo, end, _) = hello
    fields = {"skip_special_tokens": skip, "include_stop_str_in_output": include}
    params = greedy(9, stop_token_ids=[end], **fields)
    whole = llm.generate([[1]], params)[0].outputs[0]
    assert whole.text == text
    assert whole.token_ids == [he, llo, end]
    assert len(whole.logprobs) == 3
    assert (whole.finish_reason, whole.stop_reason) == ("stop", end)
    assert merge_outputs(stream_all(llm, [1], params)).outputs[0] == whole


@pytest.mark.parametrize(("include", "text"), [(False, "he"), (True, "hello")])
def test_c03_the_text_of_a_plain_stop_token_is_kept_on_request(hello, include, text):
    llm, (he, llo, *_) = hello
    params = greedy(9, stop_token_ids=[llo], include_stop_str_in_output=include)
    whole = llm.generate([[1]], params)[0].outputs[0]
    assert (whole.text, whole.token_ids, whole.stop_reason) == (text, [he, llo], llo)
    assert merge_outputs(stream_all(llm, [1], params)).outputs[0] == whole


def test_c03_text_that_is_held_is_released_before_the_token_that_ends_it(hello):
    llm, (he, llo, end, _) = hello
    whole = llm.generate([[1]], greedy(9, stop=["lloX"], stop_token_ids=[end]))[0].outputs[0]
    assert (whole.text, whole.token_ids) == ("hello", [he, llo, end])


def test_c03_a_special_token_within_the_text_goes_by_the_flag(hello):
    llm, (he, llo, end, more) = hello
    for skip, text in ((True, "hellomore"), (False, "hello<|end|>more")):
        whole = llm.generate([[1]], greedy(4, skip_special_tokens=skip))[0].outputs[0]
        assert (whole.text, whole.token_ids) == (text, [he, llo, end, more])


def test_c03_beams_leave_out_what_ended_them_too(hello):
    llm, (he, llo, end, _) = hello
    params = BeamParams(beam_width=2, max_tokens=9, stop_token_ids=[end], skip_special_tokens=False)
    best = llm.beam_search([[1]], params)[0].outputs[0]
    assert (best.text, best.token_ids) == ("hello", [he, llo, end])


@pytest.fixture(scope="module")
def chains(tmp_path_factory):
    """Engines that say w0 w1 ... w11, in every way of stepping; the ids, and an id that is in no text."""
    tokenizer, ids, end = tokenizer_with_special(WORDS)
    path = make_script(
        tmp_path_factory.mktemp("chain"),
        ids,
        vocab_size=VOCAB_SIZE,
        tokenizer_json=tokenizer.to_str(),
        config={"eos_token_id": ids[9]},
    )
    return {way: LLM(str(path), **(SMALL | WAYS[way])) for way in WAYS}, ids, end


def expected(ids, *, max_tokens, eos, stop_ids, stop, min_tokens=0):
    """(ids, text, reason, stop reason), token by token: the earliest ending wins."""
    text, first = "", 0
    for count, (token, word) in enumerate(zip(ids, WORDS, strict=True), start=1):
        if count > min_tokens and token in {eos, *stop_ids}:
            return ids[:count], text, "stop", token if token in stop_ids else None
        text += word
        if count == min_tokens:
            first = len(text)
        found = [(text.find(s, first), s) for s in stop if text.find(s, first) >= 0]
        if found and count > min_tokens:
            start, string = min(found)
            kept = next((i for i in range(count) if len("".join(WORDS[:i])) >= start), count)
            return ids[:kept], text[:start], "stop", string
        if count == max_tokens:
            return ids[:count], text, "length", None
    raise AssertionError("it ends before the script does")


CASES = [
    {"max_tokens": 5, "stop_ids": [2]},
    {"max_tokens": 2, "stop_ids": [2]},
    {"max_tokens": 3, "stop_ids": [2]},
    {"max_tokens": 5, "stop": ["1 w2"]},
    {"max_tokens": 5, "stop": ["w4 "]},
    {"max_tokens": 5, "stop": ["w4 w5"]},
    {"max_tokens": 11},
    {"max_tokens": 10},
    {"max_tokens": 9},
    {"max_tokens": 11, "stop": ["9"]},
    {"max_tokens": 11, "stop": ["8"], "stop_ids": [8]},
    {"max_tokens": 11, "stop": ["8 w"], "stop_ids": [8]},
    {"max_tokens": 11, "stop": ["w"], "min_tokens": 4},
    {"max_tokens": 11, "stop": ["3 w4", "w6"], "min_tokens": 4},
]


def check(chains, way, case):
    llms, ids, _ = chains
    stop_ids = [ids[i] for i in case.get("stop_ids", ())]
    fields = {"stop": case.get("stop", []), "min_tokens": case.get("min_tokens", 0)}
    wanted = expected(ids, max_tokens=case["max_tokens"], eos=ids[9], stop_ids=stop_ids, **fields)
    params = greedy(case["max_tokens"], ignore_eos=False, stop_token_ids=stop_ids, **fields)
    llm = llms[way]
    before = llm.engine.stats().num_output_tokens
    whole = llm.generate([[1]], params)[0].outputs[0]
    found = (whole.token_ids, whole.text, whole.finish_reason, whole.stop_reason)
    assert found == wanted
    assert len(whole.logprobs) == len(whole.token_ids)
    assert llm.engine.stats().num_output_tokens - before == len(whole.token_ids)
    assert merge_outputs(stream_all(llm, [1], params)).outputs[0] == whole
    llm.engine.check_invariants()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_c26_the_earliest_ending_wins_however_many_tokens_a_step_brings(chains, way, case):
    check(chains, way, case)


@pytest.mark.parametrize("way", WAYS)
def test_c26_random_endings(chains, way):
    rng = random.Random(7)
    text = "".join(WORDS)
    for _ in range(25):
        starts = [rng.randrange(len(text) - 6) for _ in range(rng.randrange(3))]
        case = {
            "max_tokens": rng.randrange(1, 12),
            "stop_ids": rng.sample(range(12), rng.randrange(3)),
            "stop": [text[s : s + rng.randrange(1, 6)] for s in starts],
        }
        check(chains, way, case)


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """After any token, 3 and 9, both ends of the model, are the two best; then the last id, then 20."""
    tokenizer, _ = byte_level_tokenizer([])
    last = tokenizer.get_vocab_size() - 1
    path = make_bigram(
        tmp_path_factory.mktemp("eager"),
        {},
        vocab_size=last + 1,
        default={3: 9.0, 9: 8.0, last: 7.0, 20: 6.0},
        tokenizer_json=tokenizer.to_str(),
        generation_config={"eos_token_id": [3, 9]},
    )
    return LLM(str(path), **SMALL), last


def test_c05_min_tokens_count_the_output_and_mask_every_end(eager):
    llm, last = eager
    params = greedy(12, ignore_eos=False, min_tokens=6)
    out = llm.generate([[1] * 20], params)[0].outputs[0]
    assert (out.token_ids, out.finish_reason) == ([last] * 6 + [3], "stop")
    for seed in range(20):
        drawn = dataclasses.replace(params, temperature=1, seed=seed)
        ids = llm.generate([[1] * 20], drawn)[0].outputs[0].token_ids
        assert len(ids) > 6
        assert not {3, 9} & set(ids[:6])


def test_c05_nothing_else_is_masked(eager):
    llm, last = eager
    ids = llm.generate([[1]], greedy(4, min_tokens=3))[0].outputs[0].token_ids
    assert ids == [3] * 4, "ignore_eos: the end set is not what ends it"
    own = greedy(4, min_tokens=3, stop_token_ids=[3, last])
    assert llm.generate([[1]], own)[0].outputs[0].token_ids == [9, 9, 9, 3]


def test_c05_min_tokens_give_way_where_nothing_else_may_come(eager):
    llm, _ = eager
    params = greedy(6, ignore_eos=False, min_tokens=4, allowed_token_ids=[3, 9])
    out = llm.generate([[1]], params)[0].outputs[0]
    assert (out.token_ids, out.finish_reason) == ([3], "stop")


def test_c05_greedy_choices_and_prefix_hits_keep_to_it(eager):
    llm, last = eager
    params = greedy(8, ignore_eos=False, min_tokens=5, n=3)
    for _ in range(2):
        outputs = llm.generate([[1] * 12], params)[0].outputs
        assert [one.token_ids for one in outputs] == [[last] * 5 + [3]] * 3


def test_allowed_tokens_are_the_only_ones(eager):
    llm, _ = eager
    params = dataclasses.replace(
        greedy(30, allowed_token_ids=[20, 40, 41]), temperature=100, seed=1
    )
    ids = llm.generate([[1]], params)[0].outputs[0].token_ids
    assert set(ids) == {20, 40, 41}


def test_bad_words_of_one_and_several_tokens(tmp_path):
    tokenizer, ids, _ = tokenizer_with_special(["a", "b", "c", " a"])
    a, b, c, spaced = ids
    logits = {a: {b: 5.0, c: 4.0}, b: {c: 5.0, a: 4.0}, c: {a: 5.0, b: 4.0}}
    path = make_bigram(
        tmp_path,
        logits,
        vocab_size=tokenizer.get_vocab_size(),
        default={a: 5.0, b: 4.0, spaced: 3.0},
        tokenizer_json=tokenizer.to_str(),
    )
    llm = LLM(str(path), **SMALL)

    def said(**fields):
        return llm.generate([[1]], greedy(6, **fields))[0].outputs[0].token_ids

    assert said() == [a, b, c, a, b, c]
    assert said(bad_words=["b"]) == [a, c, a, c, a, c]
    assert said(bad_words=[[b, c]]) == [a, b, a, b, a, b]
    assert said(bad_words=[[a, b, c], "c"]) == [a, b, a, b, a, b]
    assert said(bad_words=[[1, a]]) == said(), "a run that begins in the prompt is none"
    assert said(bad_words=["a", "b"])[0] == spaced, "the tokenizer writes a blank and an a as two"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_token_ids", [5, VOCAB_SIZE]),
        ("stop_token_ids", [VOCAB_SIZE]),
        ("logit_bias", {VOCAB_SIZE: 1.0}),
        ("bad_words", [[5, VOCAB_SIZE]]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_field(chains, field, value):
    llm = chains[0]["ahead"]
    with pytest.raises(InvalidRequestError, match=f"{field} token ids must be in") as caught:
        llm.generate([[1]], greedy(2, **{field: value}))
    assert caught.value.param == field
    assert not llm.engine.has_work()


def test_bad_words_that_are_texts_need_a_tokenizer(tmp_path):
    llm = LLM(str(make_script(tmp_path, [5, 6], vocab_size=64)), **SMALL)
    with pytest.raises(InvalidRequestError, match="bad_words that are texts") as caught:
        llm.generate([[1]], greedy(2, bad_words=["x"]))
    assert caught.value.param == "bad_words"
    assert llm.generate([[1]], greedy(2, bad_words=[[5]]))[0].outputs[0].token_ids[0] != 5


def test_mixed_requests_keep_to_their_own_masks(eager):
    """Masked rows among plain ones, in every order, give what each gives alone."""
    llm, last = eager
    kinds = [
        greedy(5),
        greedy(5, allowed_token_ids=[20]),
        greedy(5, bad_words=[[3]]),
        greedy(5, ignore_eos=False, min_tokens=4),
    ]
    alone = [llm.generate([[1]], params)[0].outputs[0].token_ids for params in kinds]
    assert alone == [[3] * 5, [20] * 5, [9] * 5, [last] * 4 + [3]]
    for order in itertools.permutations(range(4)):
        outputs = llm.generate([[1]] * 4, [kinds[i] for i in order])
        assert [out.outputs[0].token_ids for out in outputs] == [alone[i] for i in order]


def test_masked_logprobs_are_those_of_the_model(eager):
    llm, last = eager
    raw = np.zeros(last + 1, np.float64)
    raw[[3, 9, last, 20]] = [9, 8, 7, 6]
    wanted = 6 - np.log(np.exp(raw).sum())
    out = llm.generate([[1]], greedy(3, allowed_token_ids=[20]))[0].outputs[0]
    assert out.logprobs == pytest.approx([wanted] * 3, abs=1e-4)
