"""Outputs that begin with their prompt: whole and streamed, text, ids, counts and logprobs."""

import pytest

from jaxserve.request import merge_outputs
from tests.llms import greedy, shared_llm, stream_all

PROMPT = [5, 6, 7, 8]


@pytest.mark.parametrize("num_tokens", [0, 1, 6])
@pytest.mark.parametrize("n", [1, 3])
def test_echo_puts_the_prompt_first_and_changes_nothing_else(num_tokens, n):
    llm = shared_llm()
    plain = llm.generate([PROMPT], greedy(num_tokens, n=n))[0]
    echoed = llm.generate([PROMPT], greedy(num_tokens, n=n, echo=True))[0]
    text = llm.tokenizer.decode(PROMPT)
    assert len(echoed.outputs) == n
    for one, other in zip(plain.outputs, echoed.outputs, strict=True):
        assert other.token_ids == PROMPT + one.token_ids
        assert other.text == text + one.text
        assert other.logprobs == one.logprobs
        assert other.finish_reason == one.finish_reason == "length"
    assert echoed.num_prompt_tokens == plain.num_prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_begins_with_the_prompt_once_per_choice(n):
    llm = shared_llm()
    params = greedy(6, n=n, echo=True)
    parts = stream_all(llm, PROMPT, params)
    first = {}
    for part in parts:
        for one in part.outputs:
            first.setdefault(one.index, one)
    assert all(one.token_ids[: len(PROMPT)] == PROMPT for one in first.values())
    whole = merge_outputs(parts)
    assert whole.outputs == llm.generate([PROMPT], params)[0].outputs


def test_the_prompt_s_special_tokens_go_by_the_same_flag():
    llm = shared_llm()
    prompt = [llm.tokenizer.bos_token_id, *llm.encode("hi")]
    for skip in (True, False):
        out = llm.generate([prompt], greedy(2, echo=True, skip_special_tokens=skip))[0].outputs[0]
        begin = llm.tokenizer.decode(prompt, skip_special_tokens=skip)
        assert out.text.startswith(begin)
        assert (llm.tokenizer.bos_token in begin) != skip


def test_added_requests_come_without_it():
    llm = shared_llm()
    llm.add("a", PROMPT, greedy(3, echo=True))
    parts = []
    while llm.has_work():
        parts += llm.step()
    assert len(merge_outputs(parts).outputs[0].token_ids) == 3
