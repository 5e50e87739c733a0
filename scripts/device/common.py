"""What every part of scripts/device_check shares: the time that is left, timing, fresh random rows."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the report.

    Args:
        part: "attention", "copies", "decode", "chunk", "engine", ...
        name: what was measured.
        figures: name -> number, or text where there is none to give.
        fault: what is wrong, "" where all is well.
    """

    part: str
    name: str
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    fault: str = ""


class Deadline:
    """The time that the whole check may take; what no longer fits is left out, and said so."""

    def __init__(self, limit_s: float):
        self._end = time.monotonic() + limit_s

    def left_s(self) -> float:
        """Seconds left; negative when it is over."""
        return self._end - time.monotonic()


def seconds_per_call(call: Callable[[], Any], *, repetitions: int, rounds: int = 3) -> float:
    """The least of some rounds' mean time of calls that are started back to back.

    Args:
        call: starts work on the device and returns arrays to wait for.
    """
    jax.block_until_ready(call())
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(repetitions):
            result = call()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - begin) / repetitions)
    return min(times)


def page_rows(
    counts: list[int], contexts: list[int], page_size: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Row arrays of a batch without padding, its pages dealt out at random from page 1 on.

    Args:
        counts: new tokens of each row, single tokens first.
        contexts: tokens of each row, the new ones included.
    """
    needed = [-(-context // page_size) for context in contexts]
    ids = rng.permutation(sum(needed)).astype(np.int32) + 1
    table = np.zeros((len(counts), max(needed)), np.int32)
    taken = 0
    for row, count in enumerate(needed):
        table[row, :count] = ids[taken : taken + count]
        taken += count
    singles = sum(count == 1 for count in counts)
    return {
        "kv_lens": np.array(contexts, np.int32),
        "page_table": table.reshape(-1),
        "kv_starts": np.zeros(len(counts), np.int32),
        "cu_q_lens": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        "ranges": np.array([singles, singles, len(counts)], np.int32),
    }
