"""How long a call takes on the device; every speed in scripts/device_check is measured here."""

import time
from collections.abc import Callable
from typing import Any

import jax


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
