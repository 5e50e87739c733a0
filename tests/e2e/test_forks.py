"""Choices, beams and branches on a real model: each is what it would be alone, whatever it shares."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.llm import LLM
from jaxserve.request import Request, merge_outputs
from jaxserve.sampling_params import BeamParams, SamplingParams
from jaxserve.schedule.preemption import PreemptionMode
from jaxserve.seeds import choice_seed
from tests import checkpoints
from tests.e2e.test_memory import CACHED, PLAIN, PRESSED
from tests.llms import FEW_BUCKETS, greedy, shared_llm, stream_all
from tests.text.tokenizers_for_tests import byte_level

PAGE_4 = CACHED
PROMPTS = [[(7 * i + 3 * length) % 512 for i in range(length)] for length in (5, 8, 11)]
ORACLE = json.loads((Path(__file__).parent.parent / "oracles" / "beams.json").read_text("utf-8"))


def drawn(**fields: object) -> SamplingParams:
    base = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True, "logprobs": True}
    return SamplingParams(**(base | fields))  # type: ignore[arg-type]


def one_by_one(prompt: list[int], n: int) -> list:
    """Each choice as a request of its own."""
    llm = shared_llm(**PAGE_4)
    params = [drawn(seed=choice_seed(5, i)) for i in range(n)]
    return [llm.generate([prompt], one)[0].outputs[0] for one in params]


def assert_same(found, expected) -> None:
    assert found.token_ids == expected.token_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert found.finish_reason == expected.finish_reason


@pytest.mark.parametrize("options", [PAGE_4, PRESSED], ids=["roomy", "pressed"])
def test_c13_choices_of_several_prompts_equal_their_solo_runs(options):
    llm = shared_llm(**options)
    outputs = llm.generate(PROMPTS, drawn(n=3))
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert [one.index for one in output.outputs] == [0, 1, 2]
        for found, expected in zip(output.outputs, one_by_one(prompt, 3), strict=True):
            assert_same(found, expected)
    assert len({tuple(one.token_ids) for one in outputs[0].outputs}) == 3
    assert llm.engine.stats().num_copied_pages > 0
    llm.engine.check_invariants()
    llm.engine.scheduler.kv.clear_cache()
    assert llm.engine.stats().num_free_pages == llm.engine.stats().num_pages - 1


@pytest.mark.parametrize("options", [PAGE_4, PRESSED], ids=["roomy", "pressed"])
def test_c13_beams_of_several_prompts_equal_their_solo_runs(options):
    params = BeamParams(beam_width=3, max_tokens=12, ignore_eos=True, logprobs=True)
    alone = [shared_llm(**PAGE_4).beam_search([prompt], params)[0] for prompt in PROMPTS]
    together = shared_llm(**options).beam_search(PROMPTS, params)
    for output, expected in zip(together, alone, strict=True):
        for found, other in zip(output.outputs, expected.outputs, strict=True):
            assert_same(found, other)
            assert found.score == pytest.approx(other.score, abs=1e-5)
            assert found.text == other.text
            assert found.score == pytest.approx(sum(found.logprobs) / 12, abs=1e-5)


@pytest.mark.parametrize("num_steps", [1, 3, 6])
def test_c13_aborting_a_choice_leaves_the_others(num_steps):
    llm = shared_llm(**PAGE_4)
    llm.add("a", PROMPTS[1], drawn(n=3))
    parts = [part for _ in range(num_steps) for part in llm.step()]
    parts.append(llm.engine.abort("a", 1))
    while llm.has_work():
        parts += llm.step()
    outputs = merge_outputs(parts).outputs
    assert [one.finish_reason for one in outputs] == ["length", "abort", "length"]
    expected = one_by_one(PROMPTS[1], 3)
    for index in (0, 2):
        assert_same(outputs[index], expected[index])
    assert llm.engine.stats().num_owned_pages == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_c12_choices_are_not_changed_by_preemption_and_counted_once(mode, monkeypatch):
    """Fewer pages than the sequences that run at once need, and both ways to give them up."""
    prompts = [[40 * i + j for j in range(8)] for i in range(4)]
    params = drawn(n=2, max_tokens=40)
    expected = shared_llm(**PAGE_4).generate(prompts, params)
    llm = shared_llm(**PRESSED)
    monkeypatch.setattr(llm.engine.scheduler, "preemption", PreemptionMode(mode, None))
    before = llm.engine.stats()
    outputs = llm.generate(prompts, params)
    after = llm.engine.stats()
    assert after.num_preemptions - before.num_preemptions >= 2
    assert (after.num_swaps > before.num_swaps) == (mode == "swap")
    assert after.num_output_tokens - before.num_output_tokens == 4 * 2 * 40
    for output, other in zip(outputs, expected, strict=True):
        assert output.num_prompt_tokens == 8
        for found, wanted in zip(output.outputs, other.outputs, strict=True):
            assert_same(found, wanted)


@pytest.fixture(scope="module")
def bigram(tmp_path_factory) -> LLM:
    """After most tokens: the end with p = .5, else one of the capital letters. But start 2: p(3) =
    e^-1, p(4) = e^-.75; 3 -> end e^-1; 4 -> 5 -> 6 -> 7 -> 8 -> end e^-.75 each; the rest is spread
    over 64 ids.
    """
    tokenizer = byte_level()
    end, vocab_size = tokenizer.token_to_id("<|endoftext|>"), tokenizer.get_vocab_size()
    letters = [tokenizer.token_to_id(chr(code)) for code in range(ord("A"), ord("Z") + 1)]

    def row(likely: dict[int, float], others: Sequence[int]) -> np.ndarray:
        logits = np.full(vocab_size, -30.0)
        rest = 1 - sum(math.exp(x) for x in likely.values())
        logits[others] = math.log(rest / len(others))
        for token, logprob in likely.items():
            logits[token] = logprob
        return logits

    likely = {2: {3: -1.0, 4: -0.75}, 3: {end: -1.0}}
    likely |= {a: {b: -0.75} for a, b in itertools.pairwise([4, 5, 6, 7, 8, end])}
    folder = checkpoints.make_bigram(
        tmp_path_factory.mktemp("bigram"),
        {token: row(following, range(100, 164)) for token, following in likely.items()},
        vocab_size=vocab_size,
        default=dict(enumerate(row({end: math.log(0.5)}, letters).tolist())),
        tokenizer_json=tokenizer.to_str(),
        generation_config={"eos_token_id": end},
    )
    return shared_llm(folder, **FEW_BUCKETS)


def test_c24_choices_have_lengths_texts_and_ends_of_their_own(bigram):
    llm = bigram
    params = SamplingParams(n=4, seed=5, max_tokens=40, stop=["Q"])
    first, second = (llm.generate(["ab"], params)[0] for _ in range(2))
    assert first.outputs == second.outputs
    assert len({tuple(one.token_ids) for one in first.outputs}) >= 2
    assert len({len(one.token_ids) for one in first.outputs}) >= 2
    assert all("Q" not in one.text for one in first.outputs)
    parts = stream_all(llm, "ab", params)
    ends = [one.index for part in parts for one in part.outputs if one.finish_reason]
    assert sorted(ends) == [0, 1, 2, 3]
    assert parts[-1].finished
    assert merge_outputs(parts).outputs == first.outputs
    equal = llm.generate(["ab"], SamplingParams(n=4, temperature=0, max_tokens=5))[0].outputs
    assert len({tuple(one.token_ids) for one in equal}) == 1
    assert len(equal) == 4


def test_c25_scores_divide_by_the_generated_length(bigram):
    end = bigram.tokenizer.encode("<|endoftext|>")[0]
    chain = [4, 5, 6, 7, 8, end]
    prompt = [9] * 19 + [2]
    for penalty, ids, score in [(1.0, chain, -0.75), (2.0, chain, -0.125), (0.0, [3, end], -2.0)]:
        params = BeamParams(beam_width=2, max_tokens=20, length_penalty=penalty)
        best = bigram.beam_search(prompt, params)[0].outputs[0]
        assert (best.token_ids, best.finish_reason) == (ids, "stop")
        assert best.score == pytest.approx(score, abs=1e-4)


def test_c25_beams_through_the_engine_equal_transformers(tmp_path):
    checkpoints.make_random_llama(tmp_path, **ORACLE["checkpoint"])
    llm = shared_llm(tmp_path, **PAGE_4)
    for case in ORACLE["cases"]:
        options = case["options"]
        params = BeamParams(
            beam_width=options["num_beams"],
            max_tokens=options["max_new_tokens"],
            length_penalty=options["length_penalty"],
            early_stopping=options["early_stopping"],
            stop_token_ids=case["eos_token_ids"],
        )
        (output,) = llm.beam_search([case["prompt"]], params)
        assert [one.token_ids for one in output.outputs] == case["outputs"]
        scores = [one.score for one in output.outputs]
        np.testing.assert_allclose(scores, case["scores"], rtol=1e-4)


def test_a_tree_search_shares_what_it_knows():
    """Branch, retreat, branch again: equal to asking for each branch anew, with less to compute."""
    llm, plain = shared_llm(**PAGE_4), shared_llm(**PLAIN)
    engine = llm.engine

    def run_all() -> dict[str, list[int]]:
        parts: dict[str, list] = {}
        while engine.has_work():
            for output in engine.step():
                parts.setdefault(output.request_id, []).append(output)
        return {name: merge_outputs(p).outputs[0].token_ids for name, p in parts.items()}

    engine.add(
        Request(id="root", prompt_token_ids=PROMPTS[2], sampling_params=greedy(6), hold=True)
    )
    known = {"root": PROMPTS[2] + run_all()["root"]}
    for parent, keep, thought in [
        ("root", 17, 70),
        ("0", 20, 71),
        ("root", 17, 72),
        ("root", 13, 73),
    ]:
        name = str(len(known) - 1)
        before = engine.stats().num_scheduled_tokens
        engine.fork(
            parent,
            name,
            num_tokens=keep,
            append_token_ids=[thought],
            sampling_params=greedy(6),
            hold=True,
        )
        found = run_all()[name]
        prompt = [*known[parent][:keep], thought]
        assert found == plain.generate([prompt], greedy(6))[0].outputs[0].token_ids
        known[name] = prompt + found
        num_new = len(known[name]) - 1 - min(keep, len(known[parent]) - 1)
        assert engine.stats().num_scheduled_tokens - before == num_new
    for name in known:
        engine.abort(name)
    engine.check_invariants()
    assert engine.stats().num_owned_pages == 0


def test_width_6_saves_a_third_of_the_pages():
    """Against beams that own a copy of all they know; the beams are the same."""
    llm = shared_llm(**PAGE_4)
    scheduler = llm.engine.scheduler
    params = BeamParams(beam_width=6, max_tokens=40, ignore_eos=True)
    llm.engine.add(Request(id="a", prompt_token_ids=list(range(20)), beam=params))
    shared = copied = 0
    while llm.engine.has_work():
        llm.engine.step()
        shared += llm.engine.stats().num_owned_pages
        copied += sum(len(s.page_table) for s in (*scheduler.running, *scheduler.parked))
    assert 1 - shared / copied >= 0.35


@pytest.mark.parametrize("params", [None, SamplingParams(), 3])
def test_beam_search_wants_beam_params(params):
    with pytest.raises(InvalidRequestError, match="must be BeamParams") as caught:
        shared_llm(**PAGE_4).beam_search([[1, 2]], params)
    assert caught.value.param == "params"
