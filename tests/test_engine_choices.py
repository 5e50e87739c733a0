"""n > 1: several choices of one prompt, which is computed once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.request import Request, SamplingParams, merge_outputs
from jaxserve.seeds import choice_seed
from jaxserve.text.watcher import StopWatcher
from tests.fakes import drain, expected_tokens, make_engine

PROMPT = [5, 6, 7, 8, 9]


def request(name="a", prompt=PROMPT, n=3, num_tokens=6, **fields) -> Request:
    hold = fields.pop("hold", False)
    fields = {"seed": 11, "ignore_eos": True, "max_tokens": num_tokens, "n": n} | fields
    return Request(
        id=name, prompt_token_ids=prompt, sampling_params=SamplingParams(**fields), hold=hold
    )


def seed_of(index: int, seed: int = 11) -> int:
    return choice_seed(seed, index)


def expected_choices(prompt=PROMPT, n=3, num_tokens=6, seed=11) -> list[list[int]]:
    return [expected_tokens(prompt, num_tokens, seed_of(i, seed)) for i in range(n)]


def token_ids(parts) -> list[list[int]]:
    return [one.token_ids for one in merge_outputs(parts).outputs]


@pytest.mark.parametrize("n", [0, -1, True, 1.5, 129, "2", None])
def test_c24_a_bad_n_is_named(n):
    with pytest.raises(InvalidRequestError, match=r"n must be an integer in \[1, 128\]") as caught:
        SamplingParams(n=n)
    assert caught.value.param == "n"


def test_c24_choices_are_different_repeatable_and_end_once():
    """Choice 0 draws as a request with n = 1 does, the others from derived seeds."""
    engine = make_engine(draws=True)
    for _ in range(2):
        engine.add(request(n=4))
        parts = drain(engine)["a"]
        assert token_ids(parts) == expected_choices(n=4)
        ends = [(c.index, c.finish_reason) for p in parts for c in p.outputs if c.finish_reason]
        assert sorted(ends) == [(i, "length") for i in range(4)]
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        assert all(part.num_prompt_tokens == 5 for part in parts)
    assert len({tuple(ids) for ids in expected_choices(n=4)}) == 4
    engine.add(request(n=1))
    assert token_ids(drain(engine)["a"]) == expected_choices(n=1)


def test_c24_temperature_0_gives_equal_choices():
    engine = make_engine(draws=True)
    engine.add(request(n=4, temperature=0))
    assert token_ids(drain(engine)["a"]) == [expected_tokens(PROMPT, 6)] * 4


def test_a_step_lists_only_the_choices_with_news_in_index_order():
    engine = make_engine(draws=True)
    stop = expected_tokens(PROMPT, 6, seed_of(1))[1]
    engine.add(request(stop_token_ids=[stop]))
    assert [c.index for c in engine.step()[0].outputs] == [0]  # its first token; then the forks run
    (second,) = engine.step()
    assert [c.index for c in second.outputs] == [0, 1, 2]
    third = engine.step()[0]
    assert [(c.index, c.finish_reason) for c in third.outputs] == [
        (0, None),
        (1, "stop"),
        (2, None),
    ]
    assert third.outputs[1].stop_reason == stop
    assert not third.finished
    assert [c.index for c in engine.step()[0].outputs] == [0, 2]
    drain(engine)


def test_the_prompt_is_computed_once():
    engine = make_engine(draws=True, enable_prefix_caching=False)
    prompt = list(range(30))
    engine.add(request(prompt=prompt, n=8, num_tokens=4))
    drain(engine)
    # Each choice computes the prompt's last token, or has it computed, and 3 of its own.
    assert engine.executor.num_computed_tokens == 29 + 8 * (1 + 3)
    assert engine.stats().num_forks == 7
    assert engine.stats().num_prompt_tokens == 30


@pytest.mark.parametrize("num_pages", [64, 9])
def test_c13_choices_of_several_prompts_equal_their_solo_runs(num_pages):
    """In one batch, and also where most of them have to wait or give way."""
    prompts = {name: [ord(name)] * length for name, length in (("a", 5), ("b", 8), ("c", 11))}
    engine = make_engine(draws=True, page_size=4, num_pages=num_pages, max_num_seqs=5)
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, n=3, num_tokens=14))
    parts = drain(engine)
    for name, prompt in prompts.items():
        assert token_ids(parts[name]) == expected_choices(prompt, 3, 14)
    stats = engine.stats()
    assert stats.num_owned_pages == 0
    assert stats.num_free_pages + stats.num_cached_pages == num_pages - 1
    engine.scheduler.kv.clear_cache()
    assert engine.stats().num_free_pages == num_pages - 1


def test_c13_aborting_one_choice_leaves_the_others():
    engine = make_engine(draws=True)
    engine.add(request(n=3, num_tokens=10))
    parts = [output for _ in range(4) for output in engine.step()]
    ended = engine.abort("a", 2)
    assert [(c.index, c.finish_reason) for c in ended.outputs] == [(2, "abort")]
    assert not ended.finished
    assert engine.abort("a", 2) is None
    engine.check_invariants()
    parts += drain(engine)["a"]
    merged = merge_outputs(parts)
    assert [c.index for c in merged.outputs] == [0, 1, 2]
    assert [c.token_ids for c in merged.outputs[:2]] == expected_choices(n=2, num_tokens=10)
    assert parts[-1].finished


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5, 9])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (None,)])
def test_choices_may_be_aborted_in_any_order_at_any_time(order, num_steps):
    """Before the first token the one that computes the prompt hands over to the next."""
    engine = make_engine(draws=True, max_num_batched_tokens=4)
    engine.add(request("other", n=2))
    engine.add(request(prompt=list(range(13)), num_tokens=9))
    parts: dict[str, list] = {"a": [], "other": []}
    for _ in range(num_steps):
        for output in engine.step():
            parts[output.request_id].append(output)
    for index in order:
        ended = engine.abort("a", index)
        parts["a"].append(ended)
        engine.check_invariants()
        assert ended.finished == (index in (order[-1], None))
        if not ended.finished:
            for output in engine.step():
                parts[output.request_id].append(output)
    assert engine.abort("a") is None
    ends = [(c.index, c.finish_reason) for p in parts["a"] for c in p.outputs if c.finish_reason]
    assert sorted(ends) == [(i, "abort") for i in range(3)]
    whole = expected_choices(list(range(13)), 3, 9)
    for one in merge_outputs(parts["a"]).outputs:
        assert one.token_ids == whole[one.index][: len(one.token_ids)]
    parts["other"] += drain(engine).get("other", [])
    assert token_ids(parts["other"]) == expected_choices(n=2)


def test_a_choice_that_is_not_there_cannot_be_aborted():
    engine = make_engine()
    engine.add(request())
    for index in (3, -1, True, "0"):
        with pytest.raises(InvalidRequestError, match=r"\[0, 2\]") as caught:
            engine.abort("a", index)
        assert caught.value.param == "index"
    assert engine.stats().num_waiting == 1
    engine.step()
    before = engine.executor.num_computed_tokens
    with pytest.raises(InvalidRequestError):
        engine.abort("a", 3)
    engine.step()
    assert engine.executor.num_computed_tokens == before + 3  # nobody was disturbed


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    prompt_length=st.integers(1, 20),
    num_tokens=st.integers(0, 9),
    max_num_seqs=st.integers(1, 6),
    spare_pages=st.integers(0, 30),
    caching=st.booleans(),
)
def test_any_n_runs_in_any_pool_that_holds_one(
    n, prompt_length, num_tokens, max_num_seqs, spare_pages, caching
):
    largest = -(-(prompt_length + num_tokens) // 4)
    engine = make_engine(
        draws=True,
        num_pages=1 + largest + spare_pages,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=caching,
    )
    prompt = list(range(prompt_length))
    engine.add(request(prompt=prompt, n=n, num_tokens=num_tokens))
    parts = drain(engine)["a"]
    assert token_ids(parts) == expected_choices(prompt, n, num_tokens)
    assert [c.finish_reason for c in merge_outputs(parts).outputs] == ["length"] * n
    assert engine.stats().num_owned_pages == 0
    assert engine.stats().num_output_tokens == n * num_tokens


def test_each_choice_has_its_own_watcher():
    engine = make_engine(draws=True)
    choices = expected_choices(n=3, num_tokens=8)
    stop = f"<{choices[1][3]}>"
    params = SamplingParams(n=3, seed=11, max_tokens=8, stop=[stop])
    made = Request(id="a", prompt_token_ids=PROMPT, sampling_params=params)
    decode = lambda ids: "".join(f"<{i}>" for i in ids)  # noqa: E731
    watchers = [StopWatcher(decode, stop=[stop]) for _ in range(3)]
    with pytest.raises(ValueError, match="n = 3 choices and needs a watcher for each, got 1"):
        engine.add(made, watchers[0])
    with pytest.raises(ValueError, match="got 2"):
        engine.add(made, watchers[:2])
    engine.add(made, watchers)
    outputs = merge_outputs(drain(engine)["a"]).outputs
    assert [c.text for c in outputs] == [
        decode(choices[0]),
        decode(choices[1][:3]),
        decode(choices[2]),
    ]
    assert [c.finish_reason for c in outputs] == ["length", "stop", "length"]


def test_num_cached_tokens_are_those_of_choice_0_at_its_first_admission():
    engine = make_engine(draws=True, page_size=4)
    engine.add(request("first", prompt=list(range(20)), n=2))
    assert drain(engine)["first"][-1].num_cached_tokens == 0
    engine.add(request("second", prompt=[*range(16), 500, 501], n=3))
    assert {p.num_cached_tokens for p in drain(engine)["second"]} == {16}


def test_a_sequence_that_is_not_finite_ends_alone():
    engine = make_engine(draws=True, poison=[expected_choices()[1][2]])
    engine.add(request())
    engine.add(request("other", prompt=[1, 2, 3], n=1))
    parts = drain(engine)
    outputs = merge_outputs(parts["a"]).outputs
    bad = outputs[1]
    assert (bad.finish_reason, bad.stop_reason) == ("error", "non_finite_logits")
    assert bad.token_ids == expected_choices()[1][:3]  # what it had; the third one is the poison
    assert [c.token_ids for c in (outputs[0], outputs[2])] == expected_choices()[::2]
    assert parts["a"][-1].finished
    assert token_ids(parts["other"]) == expected_choices([1, 2, 3], n=1)
    assert engine.stats().num_owned_pages == 0


def test_a_prompt_that_is_not_finite_fails_all_choices():
    engine = make_engine(poison=[7])
    engine.add(request())
    parts = drain(engine)["a"]
    outputs = merge_outputs(parts).outputs
    assert [(c.index, c.finish_reason, c.token_ids) for c in outputs] == [
        (i, "error", []) for i in range(3)
    ]
    assert parts[-1].finished
    assert engine.stats().num_cached_pages == 0
