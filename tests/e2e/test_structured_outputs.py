"""Structured outputs through the whole engine, on a model whose logits are known."""

import json
from collections.abc import Mapping
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from jaxserve.errors import ConstraintError, InvalidRequestError
from jaxserve.llm import LLM
from jaxserve.request import CompletionOutput, Request
from jaxserve.sampling_params import BeamParams, SamplingParams
from tests.checkpoints import make_bigram
from tests.text.tokenizers_for_tests import byte_level

TOKENIZER = byte_level(['" :', '{ "', ', "', "h e", "l l", "he ll", "hell o", "Ġ Ġ", "Ċ Ċ"])
V = TOKENIZER.get_vocab_size()
NUM_ROWS = V + 20  # of the head: the last have no token
END = TOKENIZER.token_to_id("<|im_end|>")
ROOMY = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 256, "page_size": 4}
ROOMY |= {"token_buckets": (4, 16), "row_buckets": (4,)}
AB = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LIST = {
    "type": "array",
    "items": {
        "anyOf": [{"enum": ["é", None, 1.5]}, {"type": "integer", "maximum": 99, "minimum": 0}]
    },
    "minItems": 1,
    "maxItems": 4,
}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def load(directory: Path, logits: Mapping[int, float], **options: object) -> LLM:
    """An engine whose next token has these logits (0 for the others), whatever came before."""
    end = {} if "eos_token_id" in options else {"eos_token_id": END}
    config = {"eos_token_id": options.pop("eos_token_id", None), **end}
    make_bigram(
        directory,
        {},
        vocab_size=NUM_ROWS,
        default=logits,
        tokenizer_json=TOKENIZER.to_str(),
        config=config,
    )
    return LLM(str(directory), **({"num_pages": 200} | ROOMY | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def blanks(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """It would say nothing but whitespace; of the rest it likes "}" most."""
    likes = {"Ġ": 9.0, "Ċ": 8.0, "ĉ": 7.0, "ĠĠ": 6.5, "ĊĊ": 6.5, "}": 3.0}
    logits = {TOKENIZER.token_to_id(token): logit for token, logit in likes.items()}
    return load(tmp_path_factory.mktemp("blanks"), logits)


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Every token is as likely as any other."""
    return load(tmp_path_factory.mktemp("even"), {})


def say(llm: LLM, prompt: str = "hello", **fields: object) -> CompletionOutput:
    params = {"temperature": 0, "max_tokens": 200} | fields
    return llm.generate([prompt], SamplingParams(**params))[0].outputs[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "schema", "text"),
    [
        ({"json": AB}, AB, '{"a": -0, "b": "x"}'),
        ({"json_object": True}, {"type": "object"}, "{}"),
        ({"json": {"enum": ["x", 2]}}, {"enum": ["x", 2]}, '"x"'),
    ],
)
def test_c40_a_model_that_loves_whitespace_ends(blanks, wanted, schema, text):
    output = say(blanks, structured_outputs=wanted)
    assert output.finish_reason == "stop"
    assert len(output.token_ids) < 80
    jsonschema.validate(json.loads(output.text), schema)
    assert output.text == text


def test_c40_without_a_grammar_it_does_not_end(blanks):
    output = say(blanks, max_tokens=40)
    assert (output.text, output.finish_reason) == (" " * 40, "length")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_samples_keep_to_the_schema_in_every_way_to_run_them(tmp_path, even, async_scheduling):
    """Several choices, preempted or not, one step ahead or not: the same texts."""
    params = [
        SamplingParams(
            temperature=2, seed=seed, max_tokens=40, n=2, structured_outputs={"json": LIST}
        )
        for seed in range(10)
    ]
    prompts = ["hello" * (1 + seed % 3) for seed in range(10)]
    expected = [one.text for output in even.generate(prompts, params) for one in output.outputs]
    pressed = load(tmp_path, {}, num_pages=12, async_scheduling=async_scheduling)
    outputs = [one for output in pressed.generate(prompts, params) for one in output.outputs]
    assert [one.text for one in outputs] == expected
    assert pressed.engine.stats().num_preemptions > 0
    ended = [one for one in outputs if one.finish_reason == "stop"]
    assert len(ended) >= 15
    for one in ended:
        assert one.token_ids[-1] == END
        jsonschema.validate(json.loads(one.text), LIST)
    assert len(set(expected)) > 10


def test_max_tokens_may_cut_it(even):
    output = say(even, structured_outputs={"regex": "(hello){3}"}, max_tokens=2)
    assert output.finish_reason == "length"
    assert "hellohellohello".startswith(output.text)


HE = {"structured_outputs": {"choice": ["he"]}}


@pytest.mark.parametrize(
    "weaker",
    [
        {"min_tokens": 50},
        {"logit_bias": dict.fromkeys({*ids("he"), *ids("h"), *ids("e"), END}, -100)},
        {"logit_bias": {ids("x")[0]: 100}},
        {"bad_words": ["he", "h", "e"]},
        {"bad_words": [[END]]},
        {"allowed_token_ids": ids("x")},
        {"stop": ["x", "hello"]},
        {"presence_penalty": 2.0, "repetition_penalty": 10.0},
    ],
)
def test_whatever_is_weaker_gives_way_to_the_grammar(even, weaker):
    output = say(even, **HE, **weaker)
    assert (output.text, output.finish_reason) == ("he", "stop")
    assert output.token_ids[-1] == END


def test_what_stops_a_text_stops_it_inside_the_grammar_too(even):
    cut = say(even, structured_outputs={"regex": "aab"}, stop=["ab"])
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("a", "stop", "ab")
    own = ids("b")
    cut = say(even, structured_outputs={"regex": "abc"}, stop_token_ids=own)
    assert (cut.finish_reason, cut.stop_reason, cut.token_ids[-1:]) == ("stop", own[0], own)


def test_the_weaker_still_have_their_say_inside_the_grammar(even):
    free = {"structured_outputs": {"regex": "[a-f]{3}"}}
    assert say(even, **free).text == "aaa"
    assert say(even, **free, allowed_token_ids=ids("c")).text == "ccc"
    assert say(even, **free, bad_words=["a", [*ids("b"), *ids("b")]]).text == "bcb"
    assert say(even, **free, logit_bias={ids("e")[0]: 1}).text == "eee"


def test_logprobs_are_of_the_model_or_of_what_was_left(even):
    wanted = {"structured_outputs": {"choice": ["he"]}, "logprobs": True}
    raw = say(even, **wanted)
    assert raw.logprobs == pytest.approx([-np.log(V)] * len(raw.token_ids), abs=1e-4)
    left = say(even, **wanted, processed_logprobs=True)
    assert all(-2 < logprob <= 0 for logprob in left.logprobs)
    assert left.logprobs[-1] == pytest.approx(0, abs=1e-6)


def test_a_branch_goes_on_with_the_grammar(even):
    prompt = ids("x hello")
    even.add(
        "root",
        prompt,
        SamplingParams(temperature=0, max_tokens=30, structured_outputs={"regex": "aaa(bb|cc)"}),
    )
    even.step()
    even.step()
    b, c = ids("b")[0], ids("c")[0]
    begin = len(prompt) + 1
    even.engine.fork("root", "again", num_tokens=begin, append_token_ids=[*ids("aa"), c])
    even.engine.fork("root", "inside", num_tokens=1)
    with pytest.raises(InvalidRequestError, match=f"token {b} after 1 others leaves") as caught:
        even.engine.fork("root", "wrong", num_tokens=begin, append_token_ids=[b])
    assert caught.value.param == "append_token_ids"
    said: dict[str, list[int]] = {"root": [], "again": [], "inside": []}
    while even.has_work():
        for output in even.step():
            said[output.request_id] += output.outputs[0].token_ids
    assert said["again"] == [c, END]
    assert TOKENIZER.decode(said["inside"]) == "aaabb"


class Stuck:
    """A grammar that fails after a number of tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def needs_mask(self, num_output_tokens: int) -> bool:
        return True

    def fill(self, output_token_ids, mask) -> None:
        if len(output_token_ids) >= self.num_tokens:
            raise ConstraintError("no way on", param="structured_outputs")

    def branch(self, output_token_ids) -> "Stuck":
        return self


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_a_grammar_that_cannot_go_on_ends_its_request_alone(even, num_tokens):
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs={"regex": "a{5}"})
    even.engine.add(
        Request(id="stuck", prompt_token_ids=ids("hello"), sampling_params=params),
        grammar=Stuck(num_tokens),
    )
    even.add("other", ids("hello"), params)
    parts: dict[str, list[CompletionOutput]] = {"stuck": [], "other": []}
    while even.has_work():
        for output in even.step():
            parts[output.request_id] += output.outputs
    stuck, other = parts["stuck"], parts["other"]
    assert (stuck[-1].finish_reason, stuck[-1].stop_reason) == ("error", "structured_outputs")
    assert sum(len(part.token_ids) for part in stuck) == num_tokens
    assert "".join(part.text for part in other) == "aaaaa"
    even.engine.check_invariants()
    assert even.engine.stats().num_running == 0


def test_what_cannot_be_served_is_refused_and_nothing_is_queued(tmp_path, even):
    with pytest.raises(InvalidRequestError, match="false where structured_outputs are given"):
        SamplingParams(ignore_eos=True, structured_outputs={"regex": "a"})
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.json at '#/not'"):
        say(even, structured_outputs={"json": {"not": {}}})
    with pytest.raises(InvalidRequestError, match="exactly one of json"):
        SamplingParams(structured_outputs={})
    with pytest.raises(TypeError):
        BeamParams(beam_width=2, structured_outputs={"regex": "a"})  # type: ignore[call-arg]
    params = SamplingParams(structured_outputs={"regex": "a"})
    request = Request(id="a", prompt_token_ids=[1], sampling_params=params)
    with pytest.raises(InvalidRequestError, match="structured_outputs need a tokenizer") as caught:
        even.engine.add(request)
    assert caught.value.param == "structured_outputs"
    plain = Request(id="a", prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=1))
    for unwanted, grammar in ((plain, Stuck(1)), (request, [Stuck(1), Stuck(1)])):
        with pytest.raises(ValueError, match="grammar: request 'a'"):
            even.engine.add(unwanted, grammar=grammar)
    assert not even.has_work()
    endless = load(tmp_path, {}, eos_token_id=None)
    with pytest.raises(InvalidRequestError, match="needs an end token"):
        say(endless, structured_outputs={"regex": "a"})
