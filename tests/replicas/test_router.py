import pytest

from jaxserve.replicas.router import FIRST_GUESS_TOKENS, Router
from jaxserve.request import CompletionOutput, Request, RequestOutput
from jaxserve.sampling_params import SamplingParams

PAGE = 4


class Cache:
    """Has cached so many tokens of any prompt."""

    def __init__(self, num_tokens: int = 0):
        self.num_tokens = num_tokens

    def num_cached_tokens(self, request: Request) -> int:
        return min(self.num_tokens, len(request.prompt_token_ids) - 1)


def request(name: str, prompt: list[int], max_tokens: int | None = 4, salt=None, n: int = 1):
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return Request(id=name, prompt_token_ids=prompt, sampling_params=params, cache_salt=salt)


def released(name: str, num_tokens: int, *, finished: bool = False) -> RequestOutput:
    output = CompletionOutput(0, "", [1] * num_tokens, None)
    return RequestOutput(name, [output], 1, 0, finished=finished)


def add(router: Router, one: Request) -> int:
    replica = router.route(one)
    router.add(replica, one)
    router.check_invariants()
    return replica


def prompt_of(number: int, length: int = 8) -> list[int]:
    return [100 * number + i for i in range(length)]


def test_requests_with_nothing_in_common_are_spread_evenly():
    router = Router([Cache(), Cache(), Cache()], page_size=PAGE)
    placed = [add(router, request(str(i), prompt_of(i))) for i in range(9)]
    assert sorted(placed[:3]) == sorted(placed[3:6]) == sorted(placed[6:]) == [0, 1, 2]


def test_a_long_prompt_counts_for_as_many_short_ones():
    router = Router([Cache(), Cache()], page_size=PAGE)
    assert add(router, request("long", prompt_of(1, 40))) == 0
    assert [add(router, request(str(i), prompt_of(2 + i))) for i in range(3)] == [1, 1, 1]
    assert add(router, request("next", prompt_of(9))) == 1  # 48 against 44 before it, 36 + 12 after
    assert add(router, request("last", prompt_of(10))) == 0


def test_what_a_replica_has_cached_draws_a_request_to_it():
    router = Router([Cache(), Cache(8), Cache(4)], page_size=PAGE)
    assert router.route(request("a", prompt_of(1, 12))) == 1


def test_a_cached_prefix_is_followed_only_as_long_as_it_saves_more_than_it_delays():
    """24 tokens are cached; each request that is there already has 12 to do."""
    router = Router([Cache(), Cache(24)], page_size=PAGE)
    placed = [add(router, request(str(i), prompt_of(i, 32))) for i in range(6)]
    # Costs: 12 a request where it is cached, 36 where it is not.
    assert placed == [1, 1, 1, 0, 1, 1] or placed == [1, 1, 0, 1, 1, 1]


def test_prompts_in_flight_with_the_same_beginning_stay_together():
    router = Router([Cache(), Cache()], page_size=PAGE)
    groups = [
        [add(router, request(f"{g}-{i}", [*prompt_of(g, 64), i])) for g in range(2)]
        for i in range(4)
    ]
    assert all(set(column) in ({0}, {1}) for column in zip(*groups, strict=True))
    assert groups[0][0] != groups[0][1]


def test_prompts_of_another_salt_or_of_less_than_a_page_have_nothing_in_common():
    router = Router([Cache(), Cache()], page_size=PAGE)
    assert add(router, request("a", prompt_of(1, 64), salt="x")) == 0
    assert add(router, request("b", prompt_of(1, 64), salt="y")) == 1
    router = Router([Cache(), Cache()], page_size=PAGE)
    assert add(router, request("a", prompt_of(1, 3))) == 0
    assert add(router, request("b", prompt_of(1, 3))) == 1


def test_without_a_prefix_cache_nobody_shares_a_prompt():
    router = Router([Cache(), Cache()], page_size=PAGE, shares_prompts=False)
    assert [add(router, request(str(i), prompt_of(1, 64))) for i in range(4)] == [0, 1, 0, 1]


def test_work_goes_as_it_is_done_and_nothing_is_left_of_what_has_ended():
    router = Router([Cache(), Cache()], page_size=PAGE)
    add(router, request("a", prompt_of(1, 8), max_tokens=20))
    assert router.route(request("b", prompt_of(2, 8))) == 1
    router.observe(released("a", 1))
    router.observe(released("a", 18))  # 8 of the prompt and 19 of the output are done
    router.check_invariants()
    add(router, request("b", prompt_of(2, 8), max_tokens=20))
    assert router.route(request("c", prompt_of(3, 8))) == 0
    router.observe(released("a", 1, finished=True))
    router.observe(released("b", 3, finished=True))
    router.check_invariants()
    assert router._work == [0, 0]
    assert [prompts.num_pages for prompts in router._prompts] == [0, 0]


def test_of_outputs_without_a_limit_the_mean_so_far_is_expected():
    router = Router([Cache(), Cache()], page_size=PAGE)
    add(router, request("a", prompt_of(1, 8), max_tokens=None))
    assert router._work == [8 + FIRST_GUESS_TOKENS, 0]
    router.observe(released("a", 2, finished=True))
    add(router, request("b", prompt_of(2, 8), max_tokens=None, n=3))
    assert router._work == [8 + 3 * ((FIRST_GUESS_TOKENS + 2) // 2), 0]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_prompts_that_begin_alike_can_end_in_any_order(order):
    router = Router([Cache()], page_size=PAGE)
    prompts = [prompt_of(1, 16), prompt_of(1, 8), [*prompt_of(1, 12), *prompt_of(2, 8)]]
    for i, prompt in enumerate(prompts):
        add(router, request(str(i), prompt))
    for number, i in enumerate(order, 1):
        router.observe(released(str(i), 1, finished=True))
        router.check_invariants()
        left = [prompts[j] for j in order[number:]]
        expected = max(
            (len(prompts[0][:12]) if p is prompts[2] else len(p) for p in left), default=0
        )
        assert router._prompts[0].num_tokens(None, prompts[0]) == min(expected, 15)
