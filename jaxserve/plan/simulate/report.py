"""What a simulation measured: collected step by step by the loop, summed up as JSON for people.

Invariant: nothing here is per token but the gaps between tokens, kept as doubles, so a trace of
millions of output tokens takes tens of megabytes.
"""

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.plan.traces import BLOCK_SIZE, Trace

PERCENTILES = (50, 95, 99)


def num_block_hits(num_cached: int, num_prompt: int, page_size: int) -> int:
    """Blocks of a prompt that were in the tree when it was admitted.

    A block counts when all its full pages were found. The last block may be partial: it counts when
    the match reaches the prompt's last full page and that page lies in the block. (With pages of a
    whole block a partial block has no full page and never counts.) A match of the whole prompt is
    reported one token short, because one has to be computed again.

    Args:
        num_cached: tokens found, as the scheduler reports them.
        num_prompt: tokens of the prompt.
        page_size: tokens a page.

    Returns:
        A number in [0, ceil(num_prompt / BLOCK_SIZE)].
    """
    found = num_cached + 1 if (num_cached + 1) % page_size == 0 else num_cached
    whole = found // BLOCK_SIZE
    last_full_page_end = num_prompt // page_size * page_size
    if num_prompt % BLOCK_SIZE and found >= last_full_page_end > whole * BLOCK_SIZE:
        return whole + 1
    return whole


@dataclass(kw_only=True)
class Measures:
    """Sums and samples of one run.

    Args:
        page_size: tokens a page.
    """

    page_size: int
    num_steps: int = 0
    busy_s: float = 0.0  # time in steps
    end_s: float = 0.0  # when the last request ended
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_blocks: int = 0
    num_block_hits: int = 0
    num_running_most: int = 0
    held_token_s: float = 0.0  # tokens held, times seconds
    owned_slot_s: float = 0.0  # slots of owned pages, times seconds
    # f64, a value per request or per gap
    ttft_s: array = field(default_factory=lambda: array("d"))
    e2el_s: array = field(default_factory=lambda: array("d"))
    itl_s: array = field(default_factory=lambda: array("d"))
    itl_end_s: array = field(default_factory=lambda: array("d"))  # when each gap ended
    ttft_prompt_tokens: array = field(default_factory=lambda: array("q"))  # i64, as ttft_s

    def first_token(self, num_prompt: int, ttft_s: float) -> None:
        """Takes in a request's first token: its prompt's length and how long it took, seconds."""
        self.ttft_s.append(ttft_s)
        self.ttft_prompt_tokens.append(num_prompt)

    def finished(self, num_prompt: int, num_cached: int, num_blocks: int) -> None:
        """Takes in a request that has ended.

        Args:
            num_prompt: tokens of its prompt, as simulated.
            num_cached: those of them found in the cache at its first admission.
            num_blocks: blocks that its trace counts; 0 when it has none.
        """
        self.num_prompt_tokens += num_prompt
        self.num_cached_tokens += num_cached
        self.num_blocks += num_blocks
        if num_blocks:
            self.num_block_hits += num_block_hits(num_cached, num_prompt, self.page_size)


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """A run that is over.

    Args:
        trace: what was replayed.
        measures: what was seen.
        num_pages: pages of the pool, the null page included; None = unlimited.
        counters: the scheduler's own counts, by name.
        wall_s: how long the simulation itself took.
    """

    trace: Trace
    measures: Measures
    num_pages: int | None
    counters: dict[str, int]
    wall_s: float

    @property
    def block_hit_rate(self) -> float | None:
        """Blocks found / blocks; None for a trace without blocks."""
        return _ratio(self.measures.num_block_hits, self.measures.num_blocks)

    @property
    def token_hit_rate(self) -> float:
        """Prompt tokens found / prompt tokens."""
        return self.measures.num_cached_tokens / self.measures.num_prompt_tokens

    @property
    def kv_utilisation(self) -> float:
        """Tokens held / slots of owned pages, weighted by time."""
        return self.measures.held_token_s / self.measures.owned_slot_s

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens / seconds from the first arrival to the last token."""
        return self.measures.num_output_tokens / self.measures.end_s

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values; times in seconds of the simulated clock."""
        measures = self.measures
        return {
            "trace": self.trace.name,
            "num_requests": len(measures.e2el_s),
            "num_prompt_tokens": measures.num_prompt_tokens,
            "num_output_tokens": measures.num_output_tokens,
            "num_computed_tokens": measures.num_computed_tokens,
            "block_hit_rate": self.block_hit_rate,
            "token_hit_rate": self.token_hit_rate,
            "kv_utilisation": self.kv_utilisation,
            "output_tokens_per_s": self.output_tokens_per_s,
            "ttft_s": percentiles(measures.ttft_s),
            "itl_s": percentiles(measures.itl_s),
            "e2el_s": percentiles(measures.e2el_s),
            "num_steps": measures.num_steps,
            **self.counters,
            "num_pages": self.num_pages,
            "page_size": measures.page_size,
            "num_running_most": measures.num_running_most,
            "simulated_s": measures.end_s,
            "busy_s": measures.busy_s,
            "wall_s": self.wall_s,
        }


def percentiles(values: array) -> dict[str, float] | None:
    """p50, p95, p99 (linear between samples) and max; None without samples.

    Args:
        values: f64 samples.
    """
    if not values:
        return None
    samples = np.frombuffer(values)
    found = np.percentile(samples, PERCENTILES)
    named = {f"p{p}": float(v) for p, v in zip(PERCENTILES, found, strict=True)}
    return {**named, "max": float(samples.max())}


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
