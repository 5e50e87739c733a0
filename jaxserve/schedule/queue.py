"""Those who wait, and the policies that say who of them comes first. Used by the scheduler.

A policy gives each sequence a rank that does not change while it waits; `lpm` alone looks again
before every step, because what is cached changes. One small class per policy, kept in `POLICIES`.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from jaxserve.schedule.sequence import Sequence

PATIENCE = 4  # every fourth admission goes to the oldest, where the policy may overtake it
LPM_WINDOW = 64  # the oldest so many are looked up in the cache before a step

NumCached = Callable[[Sequence], int]


class Policy(Protocol):
    """Who of the waiting comes first, and who of the running gives way last.

    Args:
        in_order: one that cannot be admitted yet holds up those behind it. So a later request never
            runs in more steps than an earlier one.
        overtakes: an older sequence may be passed for ever; `WaitingQueue` then lets the oldest go
            first now and then.
    """

    in_order: bool
    overtakes: bool

    def rank(self, seq: Sequence) -> Any:
        """Smaller is sooner; constant while the sequence waits."""
        ...

    def standing(self, seq: Sequence) -> Any:
        """Among the running ones the largest gives way first."""
        ...

    def candidates(self, ranked: list[Sequence], num_cached: NumCached) -> Iterator[Sequence]:
        """In which order to try them; `ranked` is sorted by rank."""
        ...


class Fcfs:
    """First come, first served."""

    in_order = True
    overtakes = False

    def rank(self, seq: Sequence) -> Any:
        return seq.order

    def standing(self, seq: Sequence) -> Any:
        return seq.order

    def candidates(self, ranked: list[Sequence], num_cached: NumCached) -> Iterator[Sequence]:
        del num_cached
        return iter(ranked)


class ByPriority(Fcfs):
    """The smallest `Request.priority`, then the oldest; running ones give way in that order too.

    Starvation of large priorities is what was asked for.
    """

    def rank(self, seq: Sequence) -> Any:
        return seq.request.priority, seq.order

    standing = rank


class ShortFirst(Fcfs):
    """The shortest, then the oldest."""

    in_order = False
    overtakes = True

    def rank(self, seq: Sequence) -> Any:
        return len(seq.token_ids), seq.order


class LongestPrefixMatch(Fcfs):
    """The longest cached prefix, then the oldest, among the oldest `LPM_WINDOW`.

    Source: SGLang (Zheng et al., 2024), section 3, cache-aware scheduling.
    """

    in_order = False
    overtakes = True

    def candidates(self, ranked: list[Sequence], num_cached: NumCached) -> Iterator[Sequence]:
        window = ranked[:LPM_WINDOW]
        return iter(sorted(window, key=lambda seq: (-num_cached(seq), seq.order)))


POLICIES: dict[str, type[Policy]] = {
    "fcfs": Fcfs,
    "priority": ByPriority,
    "lpm": LongestPrefixMatch,
    "short_first": ShortFirst,
}


class WaitingQueue:
    """The waiting sequences, sorted by their rank under a policy.

    Args:
        policy: gives the ranks.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self._ranked: list[Sequence] = []
        self._oldest: list[tuple[Any, int, Sequence]] = []  # a heap by order; may hold gone ones
        self._waiting: set[Sequence] = set()
        self._num_overtaken = 0  # admissions since the oldest was last served

    def __len__(self) -> int:
        return len(self._ranked)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of their ranks."""
        return iter(self._ranked)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._waiting

    def head(self) -> list[Sequence]:
        """The one with the smallest rank, if there is one."""
        return self._ranked[:1]

    def push(self, seq: Sequence) -> None:
        insort(self._ranked, seq, key=self.policy.rank)
        self._waiting.add(seq)
        if self.policy.overtakes:
            heapq.heappush(self._oldest, (seq.order, id(seq), seq))

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self._ranked, self.policy.rank(seq), key=self.policy.rank)
        if index == len(self._ranked) or self._ranked[index] is not seq:
            raise ValueError(f"request {seq.request.id!r} does not wait")
        del self._ranked[index]
        self._waiting.remove(seq)

    def admit(self, seq: Sequence) -> None:
        """Takes one out that will run now."""
        was_oldest = self.policy.overtakes and seq is self._find_oldest()
        self.remove(seq)
        self._num_overtaken = 0 if was_oldest else self._num_overtaken + 1

    def candidates(self, num_cached: NumCached) -> Iterator[Sequence]:
        """In which order to try to admit them. Stop at the first change of the queue and ask
        again.
        """
        if self.policy.overtakes and self._ranked and self._num_overtaken >= PATIENCE - 1:
            yield self._find_oldest()
        yield from self.policy.candidates(self._ranked, num_cached)

    def _find_oldest(self) -> Sequence:
        while self._oldest[0][2] not in self._waiting:
            heapq.heappop(self._oldest)
        return self._oldest[0][2]

    def check_invariants(self) -> None:
        """Raises AssertionError when the order is not that of the ranks."""
        ranks = [self.policy.rank(seq) for seq in self._ranked]
        assert ranks == sorted(ranks), f"not in the order of {type(self.policy).__name__}"
        assert set(self._ranked) == self._waiting
