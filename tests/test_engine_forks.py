"""Branching off requests in flight and held ones: what a tree search does, and new weights."""

import itertools

import pytest

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.request import CacheSalt, Request, SamplingParams, merge_outputs
from tests.fakes import VOCAB_SIZE, drain, expected_tokens, make_engine, next_token

PROMPT = [5, 6, 7, 8, 9]


def greedy(num_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, **fields)


def add(engine, name="root", prompt=PROMPT, num_tokens=6, **fields) -> None:
    engine.add(
        Request(id=name, prompt_token_ids=prompt, sampling_params=greedy(num_tokens), **fields)
    )


def ids(parts) -> list[int]:
    return merge_outputs(parts).outputs[0].token_ids


def computed(engine) -> int:
    return engine.executor.num_computed_tokens


@pytest.mark.parametrize("caching", [True, False])
def test_branch_retreat_and_branch_again_compute_nothing_twice(caching):
    """A tree search over held nodes: each step down computes its own new tokens and no others."""
    engine = make_engine(enable_prefix_caching=caching, page_size=4)
    add(engine, hold=True)
    root = PROMPT + ids(drain(engine)["root"])
    assert not engine.has_work()
    assert computed(engine) == len(root) - 1
    known = {"root": root}
    # (parent, tokens kept of it, thought appended): down, down again, back to the root, half way up.
    for number, (parent, keep, thought) in enumerate(
        [("root", 11, [100]), ("0", 15, [101, 102]), ("root", 11, [103]), ("root", 7, [104]),
         ("2", 12, []), ("0", 15, [105])]
    ):  # fmt: skip
        name, before = str(number), computed(engine)
        engine.fork(
            parent,
            name,
            num_tokens=keep,
            append_token_ids=thought,
            sampling_params=greedy(4),
            hold=True,
        )
        prompt = known[parent][:keep] + thought
        last = drain(engine)[name][-1]
        known[name] = prompt + expected_tokens(prompt, 4)
        assert last.num_prompt_tokens == len(prompt)
        # The parent computed all of its tokens but the last.
        shared = min(keep, len(known[parent]) - 1, len(prompt) - 1)
        assert last.num_cached_tokens == shared
        assert computed(engine) - before == len(known[name]) - 1 - shared
        engine.check_invariants()
    for name in known:
        assert engine.abort(name) is None
        engine.check_invariants()
    assert engine.stats().num_owned_pages == 0
    assert engine.stats().num_held == 0


def test_a_fork_begins_with_all_tokens_so_far_and_the_parent_runs_on():
    engine = make_engine()
    add(engine, num_tokens=12)
    parts = {"root": [output for _ in range(5) for output in engine.step()]}
    so_far = PROMPT + ids(parts["root"])
    engine.fork("root", "branch", append_token_ids=[42], sampling_params=greedy(3))
    for name, more in drain(engine).items():
        parts.setdefault(name, []).extend(more)
    assert ids(parts["root"]) == expected_tokens(PROMPT, 12)
    assert ids(parts["branch"]) == expected_tokens([*so_far, 42], 3)


@pytest.mark.parametrize("num_steps", range(8))
def test_a_fork_at_any_time(num_steps):
    """Of a waiting request, in the middle of its prompt, while it decodes."""
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=2)
    add(engine, prompt=list(range(13)), num_tokens=6)
    parts = {"root": [output for _ in range(num_steps) for output in engine.step()]}
    engine.fork("root", "branch", num_tokens=10, append_token_ids=[1], sampling_params=greedy(3))
    engine.check_invariants()
    for name, more in drain(engine).items():
        parts.setdefault(name, []).extend(more)
    assert ids(parts["root"]) == expected_tokens(range(13), 6)
    assert ids(parts["branch"]) == expected_tokens([*range(10), 1], 3)


def test_a_held_request_whose_pages_were_taken_still_forks():
    engine = make_engine(num_pages=9, page_size=4, enable_prefix_caching=False)
    add(engine, hold=True)
    root = PROMPT + ids(drain(engine)["root"])
    add(engine, "big", prompt=list(range(20)), num_tokens=10)
    assert ids(drain(engine)["big"]) == expected_tokens(range(20), 10)
    assert engine.stats().num_parked_given_up == 1
    engine.fork("root", "branch", sampling_params=greedy(4))
    parts = drain(engine)["branch"]
    assert parts[-1].num_cached_tokens == 0
    assert ids(parts) == expected_tokens(root, 4)
    engine.abort("root")
    engine.check_invariants()
    assert engine.stats().num_owned_pages == 0


def test_what_a_fork_inherits_and_what_it_may_change():
    engine = make_engine(draws=True)
    salt = CacheSalt("request", "s")
    params = SamplingParams(max_tokens=5, seed=3, n=2, ignore_eos=True)
    root = Request(
        id="root", prompt_token_ids=PROMPT, sampling_params=params, priority=7, cache_salt=salt
    )
    engine.add(root)
    engine.step()
    engine.fork("root", "branch")
    engine.fork("root", "twin")
    request = engine.requests.in_flight["branch"].request
    assert (request.priority, request.cache_salt, request.hold) == (7, salt, False)
    assert (request.sampling_params.n, request.sampling_params.max_tokens) == (1, 5)
    parts = drain(engine)
    assert ids(parts["branch"]) != ids(parts["twin"])  # each has a seed of its own


def test_choices_are_forked_by_index_and_forks_may_have_choices():
    engine = make_engine(draws=True)
    params = SamplingParams(max_tokens=5, seed=3, n=3, ignore_eos=True)
    engine.add(Request(id="root", prompt_token_ids=PROMPT, sampling_params=params, hold=True))
    choices = merge_outputs(drain(engine)["root"]).outputs
    assert engine.stats().num_held == 3
    for index, choice in enumerate(choices):
        before = computed(engine)
        engine.fork("root", str(index), index=index, sampling_params=greedy(4, n=2))
        outputs = merge_outputs(drain(engine)[str(index)]).outputs
        assert [one.token_ids for one in outputs] == [
            expected_tokens(PROMPT + choice.token_ids, 4)
        ] * 2
        assert computed(engine) - before == 2 * (1 + 3)
    engine.abort("root")
    engine.check_invariants()
    assert engine.stats().num_owned_pages == 0


def test_a_choice_that_has_not_begun_is_forked_from_the_one_that_has():
    engine = make_engine(max_num_batched_tokens=4)
    params = greedy(4, n=3)
    engine.add(Request(id="root", prompt_token_ids=range(11), sampling_params=params))
    engine.step()
    engine.fork("root", "branch", index=2, sampling_params=greedy(4))
    parts = drain(engine)
    assert ids(parts["branch"]) == expected_tokens(range(11), 4)
    assert [one.token_ids for one in merge_outputs(parts["root"]).outputs] == [
        expected_tokens(range(11), 4)
    ] * 3


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({"request_id": "gone"}, "id"),
        ({"request_id": None}, "id"),
        ({"request_id": ["root"]}, "id"),
        ({"new_id": None}, "id"),
        ({"new_id": ["branch"]}, "id"),
        ({"new_id": "root"}, "id"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_tokens": 12}, "num_tokens"),
        ({"num_tokens": True}, "num_tokens"),
        ({"num_tokens": 2.0}, "num_tokens"),
        ({"index": 1}, "index"),
        ({"index": -1}, "index"),
        ({"append_token_ids": 7}, "append_token_ids"),
        ({"append_token_ids": "7"}, "append_token_ids"),
        ({"append_token_ids": b"7"}, "append_token_ids"),
        ({"append_token_ids": {7: 7}}, "append_token_ids"),
        ({"append_token_ids": [VOCAB_SIZE]}, "prompt"),
        ({"append_token_ids": [True]}, "prompt"),
        ({"append_token_ids": [1] * 200}, "prompt"),
        ({"sampling_params": greedy(3, stop=["x"])}, "stop"),
        ({"sampling_params": {"n": 1}}, "sampling_params"),
        ({"sampling_params": 0}, "sampling_params"),
        ({"hold": 1}, "hold"),
    ],
)
def test_a_bad_fork_is_refused_by_name_and_changes_nothing(call, param):
    engine = make_engine()
    add(engine, hold=True)
    drain(engine)
    arguments = {"request_id": "root", "new_id": "branch"} | call
    with pytest.raises(InvalidRequestError) as caught:
        engine.fork(arguments.pop("request_id"), arguments.pop("new_id"), **arguments)
    assert caught.value.param == param
    assert not engine.has_work()
    engine.fork("root", "branch")
    assert "branch" in drain(engine)


def test_held_ids_are_taken_until_they_are_let_go():
    engine = make_engine()
    add(engine, hold=True)
    drain(engine)
    assert not engine.has_request("root")
    with pytest.raises(InvalidRequestError, match="id 'root' is already in flight or held"):
        add(engine)
    with pytest.raises(InvalidRequestError, match="id 'root' is already in flight or held"):
        engine.fork("root", "root")
    engine.abort("root")
    with pytest.raises(InvalidRequestError, match="neither in flight nor held"):
        engine.fork("root", "branch")
    add(engine)
    assert ids(drain(engine)["root"]) == expected_tokens(PROMPT, 6)


def test_aborted_and_failed_requests_are_not_held():
    engine = make_engine(poison=[999])
    add(engine, "aborted", hold=True)
    engine.step()
    assert engine.abort("aborted").outputs[0].finish_reason == "abort"
    add(engine, "failed", prompt=[1, 999], hold=True)
    assert drain(engine)["failed"][-1].outputs[0].finish_reason == "error"
    for name in ("aborted", "failed"):
        with pytest.raises(InvalidRequestError, match="neither in flight nor held"):
            engine.fork(name, "branch")
    assert engine.stats().num_owned_pages == 0


def test_one_choice_may_be_aborted_and_the_rest_held():
    engine = make_engine(draws=True)
    params = SamplingParams(max_tokens=5, seed=3, n=2, ignore_eos=True)
    engine.add(Request(id="root", prompt_token_ids=PROMPT, sampling_params=params, hold=True))
    engine.step()
    engine.step()
    engine.abort("root", 0)
    drain(engine)
    with pytest.raises(InvalidRequestError, match=r"has ended \(abort\) and is not held"):
        engine.fork("root", "branch")
    engine.fork("root", "branch", index=1)
    drain(engine)
    engine.abort("root")
    assert engine.stats().num_owned_pages == 0


def test_hold_needs_tokens_to_keep():
    with pytest.raises(InvalidRequestError, match="max_tokens of at least 1") as caught:
        Request(id="a", prompt_token_ids=[1], sampling_params=greedy(0), hold=True)
    assert caught.value.param == "hold"


def test_c12_forks_under_pressure_equal_their_solo_runs():
    """Every branch of a tree of depth 3, in a pool that holds a quarter of it."""
    engine = make_engine(num_pages=14, page_size=4, max_num_seqs=3)
    add(engine, num_tokens=5, hold=True)
    nodes = {"root": PROMPT + ids(drain(engine)["root"])}
    level = ["root"]
    for _ in range(3):
        following = {}
        for name, thought in itertools.product(level, (200, 300)):
            child = f"{name}/{thought}"
            engine.fork(
                name, child, append_token_ids=[thought], sampling_params=greedy(5), hold=True
            )
            following[child] = [*nodes[name], thought]
        parts = drain(engine)
        for child, prompt in following.items():
            assert ids(parts[child]) == expected_tokens(prompt, 5)
            nodes[child] = prompt + expected_tokens(prompt, 5)
        level = list(following)
    assert engine.stats().num_parked_given_up > 0
    for name in nodes:
        engine.abort(name)
    engine.check_invariants()
    assert engine.stats().num_owned_pages == 0


def test_new_weights_are_used_at_once_and_nothing_of_the_old_ones_is():
    engine = make_engine(page_size=4)
    prompt = list(range(10))
    add(engine, "before", prompt)
    drain(engine)
    add(engine, prompt=prompt, num_tokens=9)
    add(engine, "held", prompt, num_tokens=3, hold=True)
    parts = {"root": [], "held": []}
    for _ in range(4):
        for output in engine.step():
            parts[output.request_id].append(output)
    old = ids(parts["root"])
    engine.update_params(50)
    engine.check_invariants()
    assert engine.stats().num_cached_pages == 0
    add(engine, "after", prompt)
    for name, more in drain(engine).items():
        parts.setdefault(name, []).extend(more)
    tokens = prompt + old  # kept, and everything behind them by the new weights
    while len(tokens) < len(prompt) + 9:
        tokens.append(next_token([i + 50 for i in tokens]))
    assert ids(parts["root"]) == tokens[len(prompt) :]
    fresh = list(prompt)
    for _ in range(6):
        fresh.append(next_token([i + 50 for i in fresh]))
    assert ids(parts["after"]) == fresh[len(prompt) :]
    held = prompt + ids(parts["held"])
    engine.fork("held", "branch", sampling_params=greedy(1))
    assert ids(drain(engine)["branch"]) == [next_token([i + 50 for i in held])]


def test_refused_weights_cost_nobody_anything(monkeypatch):
    engine = make_engine(page_size=4)
    add(engine, "root", list(range(10)), num_tokens=6)
    for _ in range(2):
        engine.step()

    def refuse(_):
        raise ConfigError("another shape")

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "prepare_params", refuse)
        with pytest.raises(ConfigError, match="another shape"):
            engine.update_params(1)
    before = engine.stats().num_scheduled_tokens
    drain(engine)
    assert engine.stats().num_scheduled_tokens - before == 4
