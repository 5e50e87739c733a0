"""Replaying a workload on an engine with a clock beside it, and the figures that come out; used by
`bench offline` and `bench latency`.

Invariant: nothing is timed but submitting and stepping, each request's tokens carry the time they were
released at, and no replay finds in the prefix cache what an earlier one computed: each has salts of its
own.
"""

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxserve.cli import text_engine
from jaxserve.cli.arguments import UsageError
from jaxserve.cli.request_line import RequestLine
from jaxserve.cli.stop_signals import StopSignals
from jaxserve.errors import InvalidRequestError
from jaxserve.stats import EngineStats

_PERCENTILES = (50, 90, 99)
logger = logging.getLogger("jaxserve.cli")


class Counter(Protocol):
    """A `CompileCounter`."""

    @property
    def count(self) -> int: ...


@dataclass(kw_only=True)
class Timeline:
    """One request's life.

    Args:
        num_prompt_tokens: length of its prompt.
        num_cached_tokens: how much of it was not computed again.
        token_ids: what it generated.
        logprobs: of those, if asked for.
        release_s: when tokens were released, seconds since the workload was submitted, one entry a release.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    release_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """One replay.

    Args:
        wall_s: from submitting the requests until the last one was done.
        timelines: one per request, in the workload's order.
        stats: the engine's counters at its end.
    """

    wall_s: float
    timelines: Sequence[Timeline]
    stats: EngineStats

    @property
    def num_output_tokens(self) -> int:
        return sum(len(one.token_ids) for one in self.timelines)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(one.num_prompt_tokens for one in self.timelines)


def salted(lines: Sequence[RequestLine], number: int, *, shared: bool = True) -> list[RequestLine]:
    """The same requests with cache salts that no other `number` has.

    Args:
        lines: those that had a salt in common have one in common still.
        number: of the replay.
        shared: otherwise no two requests have one in common, so that none uses another's pages.
    """
    ready = []
    for index, line in enumerate(lines):
        salt = line.cache_salt
        if salt is None or (
            isinstance(salt, str) and salt
        ):  # what it must not be is left to be refused
            salt = f"{number}/{'' if shared else index}/{salt or ''}"
        ready.append(dataclasses.replace(line, cache_salt=salt))
    return ready


def _never() -> bool:
    return False


def replay(
    llm: text_engine.TextEngine,
    lines: Sequence[RequestLine],
    is_stopped: Callable[[], bool] = _never,
) -> Repetition | None:
    """Submits all requests at once and steps until the last one is done.

    Args:
        llm: does the work.
        lines: the requests.
        is_stopped: asked between two steps whether to leave the rest undone.

    Returns:
        What was measured; None if it was stopped.

    Raises:
        UsageError: the engine refuses a line.
    """
    timelines = [Timeline() for _ in lines]
    started = time.perf_counter()
    for line in lines:
        try:
            text_engine.add_line(llm, str(line.index), line)
        except InvalidRequestError as error:
            raise UsageError(f"workload line {line.index + 1}: {error.message}") from None
    while llm.engine.has_work():
        if is_stopped():
            return None
        outputs = llm.step()
        now = time.perf_counter() - started
        for output in outputs:
            timeline = timelines[int(output.request_id)]
            piece = output.outputs[0]
            timeline.num_prompt_tokens = output.num_prompt_tokens
            timeline.num_cached_tokens = output.num_cached_tokens
            timeline.token_ids.extend(piece.token_ids)
            timeline.logprobs.extend(piece.logprobs or ())
            if piece.token_ids:
                timeline.release_s.append(now)
    wall_s = time.perf_counter() - started
    return Repetition(wall_s=wall_s, timelines=timelines, stats=llm.engine.stats())


@dataclass(kw_only=True)
class Arm:
    """One engine under measurement.

    Args:
        llm: an `LLM`, warmed up.
        options: what it was made with.
        before: the engine's counters after its warm-up.
        repetitions: what was measured so far.
        num_replays: how often it was measured, in all.
        num_compiles: programs that were compiled during them.
    """

    llm: text_engine.TextEngine
    options: Mapping[str, object]
    before: EngineStats
    repetitions: list[Repetition] = field(default_factory=list)
    num_replays: int = 0
    num_compiles: int = 0

    def measure(
        self,
        lines: Sequence[RequestLine],
        compiles: Counter,
        *,
        share_prefixes: bool = True,
        is_stopped: Callable[[], bool] = _never,
    ) -> bool:
        """Replays the workload once more.

        Args:
            lines: the workload.
            compiles: a `CompileCounter`, shared by all arms.
            share_prefixes: False: no request uses pages of another, as without a prefix cache.
            is_stopped: as of `replay`.

        Returns:
            Whether it came to its end, and is one of the repetitions.
        """
        self.num_replays += 1
        ready = salted(lines, self.num_replays, shared=share_prefixes)
        before = compiles.count
        done = replay(self.llm, ready, is_stopped)
        self.num_compiles += compiles.count - before
        if done is not None:
            self.repetitions.append(done)
        return done is not None

    def summary(self) -> dict[str, Any]:
        """The arm's figures: medians of rates and wall time, latencies over all repetitions' requests."""
        stats, startup = self.repetitions[-1].stats, self.llm.startup
        walls = [one.wall_s for one in self.repetitions]
        timelines = [line for one in self.repetitions for line in one.timelines]
        gaps = [gap for one in timelines for gap in np.diff(one.release_s).tolist()]
        num_scheduled = stats.num_scheduled_tokens - self.before.num_scheduled_tokens
        num_padding = stats.num_padding_tokens - self.before.num_padding_tokens
        first = self.repetitions[0]
        return {
            "output_tokens_per_s": statistics.median(
                one.num_output_tokens / one.wall_s for one in self.repetitions
            ),
            "total_tokens_per_s": statistics.median(
                (one.num_prompt_tokens + one.num_output_tokens) / one.wall_s
                for one in self.repetitions
            ),
            "wall_s": statistics.median(walls),
            "wall_s_each": walls,
            "num_prompt_tokens": first.num_prompt_tokens,
            "num_cached_tokens": sum(one.num_cached_tokens for one in first.timelines),
            "num_output_tokens": first.num_output_tokens,
            "ttft_s": distribution([one.release_s[0] for one in timelines if one.release_s]),
            "itl_s": distribution(gaps),
            "e2el_s": distribution([one.release_s[-1] for one in timelines if one.release_s]),
            "num_steps": stats.num_steps - self.before.num_steps,
            "num_preemptions": stats.num_preemptions - self.before.num_preemptions,
            "compiles_after_warmup": self.num_compiles,
            "padding_waste": num_padding / max(num_padding + num_scheduled, 1),
            "startup": {
                "load_s": startup.load_s,
                "compile_s": startup.compile_s,
                "warm_s": startup.warm_s,
            },
            "engine": {
                "scheduling": self.options["scheduling"],
                "seed": self.options["seed"],
                "dtype": stats.dtype,
                "kv_cache_dtype": stats.kv_cache_dtype,
                "max_num_batched_tokens": stats.max_num_batched_tokens,
                "attention_backend": stats.attention_backend,
                "page_size": stats.page_size,
                "num_pages": stats.num_pages,
                "max_num_seqs": stats.max_num_seqs,
                "max_model_len": stats.max_model_len,
            },
        }


def build_arm(model: str, options: Mapping[str, object]) -> Arm:
    """Loads an engine and notes its counters behind its warm-up."""
    llm = text_engine.load_llm(model, options)
    return Arm(llm=llm, options=options, before=llm.engine.stats())


def measure_in_turns(
    arms: Sequence[Arm],
    lines: Sequence[RequestLine],
    compiles: Counter,
    num_repetitions: int,
    stop: StopSignals,
) -> None:
    """Replays the workload on each arm in turn, and says so after each time.

    A signal ends the process until each arm has a repetition; from then on it ends the replay under
    way, and each arm is left with as many repetitions as the others.

    Args:
        arms: what is compared, or one alone.
        lines: the workload.
        compiles: a `CompileCounter`.
        num_repetitions: how often.
        stop: is asked for a stop.
    """
    for number in range(1, num_repetitions + 1):
        for arm in arms:
            if not arm.measure(lines, compiles, is_stopped=lambda: stop.requested):
                for one in arms:
                    del one.repetitions[number - 1 :]
                logger.warning(
                    "stopped by %s: the result is of %d of %d repetitions",
                    stop.name,
                    number - 1,
                    num_repetitions,
                )
                return
            last = arm.repetitions[-1]
            logger.info(
                "repetition %d of %d, %s: %d output tokens in %.2f s (%.1f tokens/s)",
                number,
                num_repetitions,
                arm.options["scheduling"],
                last.num_output_tokens,
                last.wall_s,
                last.num_output_tokens / last.wall_s,
            )
        stop.defer()


def make_compile_counter() -> Counter:
    """A `CompileCounter` that counts from now on; like the engine, it brings jax in."""
    from jaxserve.device.compile_counter import CompileCounter

    return CompileCounter()


def distribution(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles; None where there is nothing to describe."""
    if not values:
        return {"mean": None, **{f"p{p}": None for p in _PERCENTILES}}
    figures = np.percentile(values, _PERCENTILES).tolist()
    return {
        "mean": statistics.fmean(values),
        **{f"p{p}": value for p, value in zip(_PERCENTILES, figures, strict=True)},
    }
