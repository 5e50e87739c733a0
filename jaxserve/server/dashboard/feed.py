"""`Feed`: what the page shows, as JSON, made of the engine's reports and the server's own counts.

Used by `routes`. Invariant: however many pages are open, the engine is asked for a report twice a second
at most, and one that does not answer holds nobody up: the page is told what was known last.
"""

import asyncio
import base64
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

import jaxserve
from jaxserve.async_engine.report import MAX_STEPS, EngineReport, StepSummary
from jaxserve.errors import EngineDeadError
from jaxserve.pages.hot_prefixes import PrefixInfo
from jaxserve.pages.page_map import PageState, PoolMap
from jaxserve.server.metric_tallies import Recent, Second
from jaxserve.server.state import ServerState

MIN_INTERVAL_S = 0.5
REPORT_TIMEOUT_S = 1.0
MAX_CELLS = 4096  # of the map: more pages than these share cells
SPARK_S = 120
STATES = (PageState.FREE, PageState.CACHED, PageState.OWNED, PageState.SHARED)

_STATS = (
    *("num_running", "num_waiting", "num_held", "max_num_seqs", "max_num_batched_tokens"),
    *("num_steps", "num_prompt_tokens", "num_output_tokens", "num_preemptions", "num_swaps"),
    *("num_queried_tokens", "num_hit_tokens", "num_forks", "num_copied_pages", "hit_rate"),
    *("kv_utilisation", "padding_waste", "max_model_len", "attention_backend", "dtype"),
    "kv_cache_dtype",
)


class Feed:
    """Keeps the last report.

    Args:
        state: the server's.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._report: EngineReport | None = None
        self._steps: deque[StepSummary] = deque(maxlen=MAX_STEPS)
        self._asked_s = float("-inf")
        self._is_stale = False
        self._one_at_a_time = asyncio.Lock()

    async def view(self, since_step: int) -> dict[str, Any]:
        """What the page shows now.

        Args:
            since_step: the last step it has; only later ones are told.
        """
        async with self._one_at_a_time:
            await self._refresh()
        state, report = self._state, self._report
        refusal = state.refusal()
        found: dict[str, Any] = {
            "version": jaxserve.__version__,
            "model": state.served_names[0],
            "status": "ready" if refusal is None else refusal.code,
            "problem": None if refusal is None else refusal.message,
            "is_stale": self._is_stale,
            "requests": dict(state.metrics.requests),
            "seconds": seconds(state.metrics.recent, state.metrics.clock()),
        }
        if not state.is_loaded:
            return found
        tokenizer = state.model.tokenizer
        found["num_refused"] = state.admission.num_refused
        found["speaks"] = "tokens"
        if tokenizer is not None:
            found["speaks"] = "chat" if tokenizer.has_chat_template else "completions"
        if report is not None:
            found |= self._of_engine(report, since_step)
        return found

    def _of_engine(self, report: EngineReport, since_step: int) -> dict[str, Any]:
        stats = report.stats
        return {
            "last_step": report.last_step,
            "step_fields": StepSummary._fields,
            "steps": [step for step in self._steps if step.number > since_step],
            "stats": {name: getattr(stats, name) for name in _STATS},
            "num_waiting_tokens": report.num_waiting_tokens,
            "pages": None if report.pages is None else pool(report.pages, stats.page_size),
            "prefixes": [self._prefix(one) for one in report.prefixes],
        }

    async def _refresh(self) -> None:
        """Asks the engine, unless it was asked a moment ago."""
        now_s = time.monotonic()
        if now_s - self._asked_s < MIN_INTERVAL_S or self._state.refusal() is not None:
            return
        self._asked_s = now_s
        known = self._report.last_step if self._report is not None else 0
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                report = await self._state.client.report(since_step=known, with_pages=True)
        except (TimeoutError, EngineDeadError):
            self._is_stale = True
            return
        self._is_stale = False
        self._report = report
        self._steps.extend(report.steps)

    def _prefix(self, prefix: PrefixInfo) -> dict[str, Any]:
        tokenizer = self._state.model.tokenizer
        text = None
        if not prefix.is_private and tokenizer is not None:
            said = tokenizer.decode(prefix.token_ids, skip_special_tokens=True)
            text = said or tokenizer.decode(prefix.token_ids, skip_special_tokens=False)
        return {
            "parent": prefix.parent,
            "num_tokens": prefix.num_tokens,
            "num_own_tokens": prefix.num_own_tokens,
            "num_pages": prefix.num_pages,
            "num_users": prefix.num_users,
            "num_hits": prefix.num_hits,
            "num_uses_ago": prefix.num_uses_ago,
            "is_private": prefix.is_private,
            "is_cut": len(prefix.token_ids) < prefix.num_own_tokens,
            "text": text,
        }


def pool(pages: PoolMap, page_size: int) -> dict[str, Any]:
    """The map of the pool, without the null page, in at most `MAX_CELLS` cells."""
    states = np.frombuffer(pages.states, np.uint8)[1:]
    per_cell = max(1, -(-len(states) // MAX_CELLS))
    counts = np.bincount(states, minlength=len(PageState))
    return {
        "page_size": page_size,
        "num_pages": len(states),
        "pages_per_cell": per_cell,
        "cells": base64.b64encode(_cells(states, per_cell)).decode(),
        "counts": {state.name.lower(): int(counts[state]) for state in STATES},
        "num_host_pages": len(pages.host_pages),
        "num_used_host_pages": sum(pages.host_pages),
    }


def _cells(states: np.ndarray, per_cell: int) -> bytes:
    """A byte a cell: what most of its pages are used for; of equally many the one in use."""
    if per_cell == 1:
        return states.tobytes()
    num_cells = -(-len(states) // per_cell)
    padded = np.zeros(num_cells * per_cell, np.uint8)  # the null state, which is not counted
    padded[: len(states)] = states
    cells = padded.reshape(num_cells, per_cell)
    counts = np.stack([(cells == state).sum(axis=1) for state in reversed(STATES)])
    return (int(STATES[-1]) - counts.argmax(axis=0)).astype(np.uint8).tobytes()


def seconds(recent: Recent, now_s: float) -> list[Sequence[float | None]]:
    """The last whole seconds, oldest first, none left out.

    Returns:
        For each: prompt tokens, output tokens, requests ended, mean TTFT and mean ITL in seconds, or
        None where there was none.
    """
    end = int(now_s)
    by_second = {one.at_s: one for one in recent.seconds}
    return [_second(by_second.get(at)) for at in range(end - SPARK_S, end)]


def _second(one: Second | None) -> Sequence[float | None]:
    if one is None:
        return (0, 0, 0, None, None)
    return (
        one.num_prompt_tokens,
        one.num_output_tokens,
        one.num_finished,
        one.ttft_s / one.num_first_tokens if one.num_first_tokens else None,
        one.gaps_s / one.num_gaps if one.num_gaps else None,
    )
