"""`EngineReport`: what a dashboard reads of an engine, and `ReportCollector`, which makes it.

Made on the engine's side, between two steps, carried by messages: plain data throughout.

Invariant: looking on costs a step a few microseconds, however many sequences it has; what costs more
(the map of the pool, the prefixes) is made only when a report asks for it.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from jaxserve.engine import Engine
from jaxserve.pages.hot_prefixes import PrefixInfo, hottest_prefixes
from jaxserve.pages.page_map import PoolMap, map_pages
from jaxserve.replicas.engine import ReplicatedEngine, engines_of
from jaxserve.schedule.observer import StepRecord
from jaxserve.schedule.sequence import Namespace
from jaxserve.stats import EngineStats

MAX_STEPS = 512  # kept; a report has at most so many
MAX_PREFIXES = 24
MAX_TOKEN_IDS = 48  # told of each prefix: enough to recognise it

_NUM_TOKENS = attrgetter("num_tokens")


class StepSummary(NamedTuple):
    """What one step was made of.

    Args:
        number: counts the steps of the engine, from 1.
        time_s: when its result was taken in, by the engine's clock.
        seconds: how long it took.
        num_seqs: sequences that took part.
        num_decode_tokens: tokens of those that had one token to compute.
        num_chunk_tokens: tokens of the others: prompts, and what is computed again.
        num_padding_tokens: what they lack to the bucket.
        bucket_num_tokens: T of the compiled shapes it ran in.
        num_sampled_tokens: tokens that sequences got by it.
        num_running, num_waiting: sequences after it.
        num_preemptions: of the engine, so far.
    """

    number: int
    time_s: float
    seconds: float
    num_seqs: int
    num_decode_tokens: int
    num_chunk_tokens: int
    num_padding_tokens: int
    bucket_num_tokens: int
    num_sampled_tokens: int
    num_running: int
    num_waiting: int
    num_preemptions: int


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """An engine between two steps.

    Args:
        time_s: now, by the engine's clock.
        stats: counters and gauges.
        num_waiting_tokens: known tokens of the sequences that wait.
        last_step: number of the last step; 0 = none was run yet.
        steps: the steps that were asked for, as far as they are kept, oldest first.
        pages: the map of the page pool; None if it was not asked for.
        prefixes: the hottest of the prefix cache, parents before children; empty if the map was not
            asked for.
    """

    time_s: float
    stats: EngineStats
    num_waiting_tokens: int
    last_step: int
    steps: tuple[StepSummary, ...]
    pages: PoolMap | None
    prefixes: tuple[PrefixInfo, ...]


class ReportCollector:
    """Keeps the last steps of an engine and makes reports; a `StepObserver`.

    Args:
        engine: is observed from now on, until `close`.
    """

    def __init__(self, engine: Engine | ReplicatedEngine):
        self._engine = engine
        self._schedulers = [one.scheduler for one in engines_of(engine)]
        self._steps: deque[StepSummary] = deque(maxlen=MAX_STEPS)
        self._num_steps = 0
        engine.observers.append(self)

    def close(self) -> None:
        """Looks on no longer."""
        self._engine.observers.remove(self)

    def step_done(self, step: StepRecord) -> None:
        plan = step.plan
        schedulers = self._schedulers
        self._num_steps += 1
        num_seqs = len(plan.slices)
        # In a plan the slices stand in the order of their number of tokens.
        num_decode_tokens = bisect_right(plan.slices, 1, key=_NUM_TOKENS)
        self._steps.append(
            StepSummary(
                self._num_steps,
                self._engine.clock(),
                step.seconds,
                num_seqs,
                num_decode_tokens * plan.num_steps,
                plan.num_tokens - num_decode_tokens,
                plan.num_padding_tokens * plan.num_steps,
                plan.bucket.num_tokens,
                len(step.result.advanced) * plan.num_steps,
                sum([len(one.running) for one in schedulers]),
                sum([len(one.waiting) for one in schedulers]),
                sum([one.counters.num_preemptions for one in schedulers]),
            )
        )

    def weights_changed(self) -> None:
        """Changes no figure."""

    def report(self, *, since_step: int = 0, with_pages: bool = False) -> EngineReport:
        """The engine as it is now; to be called between two steps, by whoever drives it.

        Args:
            since_step: only steps after this one.
            with_pages: the map of the page pool and the hottest prefixes too.
        """
        engine = self._engine
        num_new = max(0, min(self._num_steps - since_step, len(self._steps)))
        steps = tuple(self._steps)
        return EngineReport(
            time_s=engine.clock(),
            stats=engine.stats(),
            num_waiting_tokens=sum(
                seq.num_known_tokens for one in self._schedulers for seq in one.waiting
            ),
            last_step=self._num_steps,
            steps=steps[len(steps) - num_new :],
            pages=self._map_pages() if with_pages else None,
            prefixes=self._hottest_prefixes() if with_pages else (),
        )

    def _map_pages(self) -> PoolMap:
        """The pools of all replicas, one behind the other."""
        maps = [map_pages(one.kv) for one in self._schedulers]
        return PoolMap(
            states=b"".join(one.states for one in maps),
            host_pages=b"".join(one.host_pages for one in maps),
        )

    def _hottest_prefixes(self) -> tuple[PrefixInfo, ...]:
        """Those of each replica, one behind the other."""
        found: list[PrefixInfo] = []
        for one in self._schedulers:
            begin = len(found)
            for prefix in hottest_prefixes(
                one.kv.tree,
                max_prefixes=max(1, MAX_PREFIXES // len(self._schedulers)),
                max_token_ids=MAX_TOKEN_IDS,
                is_private=_is_private,
            ):
                parent = None if prefix.parent is None else prefix.parent + begin
                found.append(replace(prefix, parent=parent))
        return tuple(found)


def _is_private(namespace: Hashable) -> bool:
    """A salt separates requests whose senders are not to know of each other's prompts."""
    return not isinstance(namespace, Namespace) or namespace.cache_salt is not None
