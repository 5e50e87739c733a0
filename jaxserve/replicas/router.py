"""`Router`: which replica a new request goes to. Pure host code; asked by `ReplicatedEngine`.

    cost of a replica = work that it has been given and not done yet + prompt tokens that are not cached there

The cheapest one gets the request; among equals the one with the fewest requests. Work is counted in tokens:
those of prompts that were not cached, and those that will come out, of which only a limit is known: until a
request has ended it counts for what requests have had so far in the mean. So a cached prefix is followed as
long as it saves more tokens than the replica has more work than the others, and never further: a popular
prefix spreads to as many replicas as it keeps busy.

What is cached is asked of each replica's own prefix cache; prompts in flight count as well, for their pages
will be there before a newcomer with the same beginning is computed (`PrefixWait`).

Invariant: the work of a replica is the sum of what its requests in flight still have to do; 0 without any.

Source: the cost of Preble (Srivatsa et al., 2024), section 3.2, with tokens in the place of times.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from jaxserve.pages.radix_node import RadixNode
from jaxserve.pages.radix_tree import RadixTree
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import SamplingParams

FIRST_GUESS_TOKENS = 128  # of an output, before any has ended; counts as one that did


class PrefixCache(Protocol):
    """Knows what a replica has cached; a `Scheduler` does."""

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a new request's prompt that the replica need not compute."""
        ...


class PromptsInFlight:
    """The prompts of a replica that have not ended, by their full pages.

    Args:
        page_size: tokens a page.
    """

    def __init__(self, page_size: int):
        self._tree = RadixTree(page_size)
        self._numbers = count()  # in the place of page ids, which nobody reads

    def num_tokens(self, namespace: Hashable, prompt: Sequence[int]) -> int:
        """The longest beginning that `prompt` has in common with one of them, in full pages, but at most
        all of it but one token.
        """
        num_tokens = self._tree.peek(namespace, prompt) * self._tree.page_size
        return min(num_tokens, len(prompt) - 1)

    def add(self, namespace: Hashable, prompt: Sequence[int]) -> RadixNode:
        """Notes a prompt; `remove` wants what is returned."""
        known, node = self._tree.match(namespace, prompt)
        self._tree.lock(node)
        rest = prompt[len(known) * self._tree.page_size :]
        num_new = len(rest) // self._tree.page_size
        return self._tree.extend(node, rest, [next(self._numbers) for _ in range(num_new)])[1]

    def remove(self, node: RadixNode) -> None:
        """Forgets a prompt, but for what others have in common with it."""
        self._tree.unlock(node)
        self._tree.evict(self._tree.num_unlocked)

    @property
    def num_pages(self) -> int:
        """Pages that are noted."""
        return self._tree.num_pages


@dataclass(slots=True)
class _Charge:
    """What a request in flight still has to do, in tokens, as far as one can tell."""

    replica: int
    num_prompt_tokens: int  # to compute; 0 once something came out
    num_output_tokens: int
    num_released: int
    node: RadixNode | None  # its prompt, where others may share it

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


class Router:
    """Chooses replicas, and keeps count of what each has to do.

    Args:
        caches: of the replicas, in their order.
        page_size: tokens a page.
        shares_prompts: whether a request finds what one in flight has computed: there is a prefix cache.
    """

    def __init__(
        self, caches: Sequence[PrefixCache], *, page_size: int, shares_prompts: bool = True
    ):
        self._caches = caches
        self._shares_prompts = shares_prompts
        self._prompts = [PromptsInFlight(page_size) for _ in caches]
        self._work = [0] * len(caches)
        self._num_requests = [0] * len(caches)
        self._charges: dict[str, _Charge] = {}
        self._num_ended = 1
        self._num_ended_tokens = FIRST_GUESS_TOKENS

    def route(self, request: Request) -> int:
        """The replica that a request should go to; notes nothing.

        Args:
            request: its prompt is int32 ids.
        """
        costs = [
            (self._work[i] + self._num_to_compute(i, request), self._num_requests[i], i)
            for i in range(len(self._caches))
        ]
        return min(costs)[2]

    def add(self, replica: int, request: Request) -> None:
        """Notes that a request was given to a replica."""
        num_choices = request.sampling_params.n
        if request.beam is not None:
            num_choices = request.beam.beam_width
        num_to_compute = self._num_to_compute(replica, request)
        num_expected = self._expected(request.sampling_params) * num_choices
        node = None
        if self._shares_prompts:
            node = self._prompts[replica].add(request.cache_salt, request.prompt_token_ids)
        self._note(request.id, _Charge(replica, num_to_compute, num_expected, 0, node))

    def add_fork(
        self, replica: int, request_id: str, num_appended: int, params: SamplingParams | None
    ) -> None:
        """Notes that a request was forked on a replica.

        Args:
            replica: which.
            request_id: the new one's.
            num_appended: tokens that follow what it shares.
            params: its own; None = as the other's, of which nothing is assumed.
        """
        num_expected = self._expected(params or SamplingParams(max_tokens=None))
        num_expected *= 1 if params is None else params.n
        self._note(request_id, _Charge(replica, num_appended, num_expected, 0, None))

    def _expected(self, params: SamplingParams) -> int:
        """Tokens of one output."""
        mean = self._num_ended_tokens // self._num_ended
        return mean if params.max_tokens is None else min(mean, params.max_tokens)

    def _note(self, request_id: str, charge: _Charge) -> None:
        self._charges[request_id] = charge
        self._work[charge.replica] += charge.num_tokens
        self._num_requests[charge.replica] += 1

    def observe(self, output: RequestOutput) -> None:
        """Takes off what a request has done; lets go of one that has ended."""
        charge = self._charges.get(output.request_id)
        if charge is None:  # an interrupt came between adding it and `add`
            return
        num_tokens = sum([len(one.token_ids) for one in output.outputs])
        before = charge.num_tokens
        charge.num_released += num_tokens
        charge.num_prompt_tokens = 0
        # One that goes on has at least a token to come.
        charge.num_output_tokens = max(1, charge.num_output_tokens - num_tokens)
        self._work[charge.replica] -= before - charge.num_tokens
        if output.finished:
            self._end(output.request_id, charge)

    def _end(self, request_id: str, charge: _Charge) -> None:
        del self._charges[request_id]
        self._work[charge.replica] -= charge.num_tokens
        self._num_requests[charge.replica] -= 1
        if charge.node is not None:
            self._prompts[charge.replica].remove(charge.node)
        self._num_ended += 1
        self._num_ended_tokens += charge.num_released

    def _num_to_compute(self, replica: int, request: Request) -> int:
        prompt = request.prompt_token_ids
        num_known = max(
            self._caches[replica].num_cached_tokens(request),
            self._prompts[replica].num_tokens(request.cache_salt, prompt),
        )
        return len(prompt) - num_known

    def check_invariants(self) -> None:
        """Raises AssertionError when the work of a replica is not that of its requests."""
        for replica, work in enumerate(self._work):
            own = [one for one in self._charges.values() if one.replica == replica]
            assert work == sum(one.num_tokens for one in own), (replica, work, own)
            assert self._num_requests[replica] == len(own)
            assert own or not self._prompts[replica].num_pages, "prompts of nobody are noted"
