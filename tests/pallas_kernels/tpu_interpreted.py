"""The TPU kernel, broken on purpose, in Pallas' interpreter: run as a program by test_attention_tpu.py.

A wrong wait makes the interpreter hang or abort, so it stands in a process of its own, with a time
limit set by the test. Prints one JSON object a line, as soon as a control is done.
"""

import dataclasses
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.ragged_paged_attention import tpu_kernel
from tests.pallas_kernels import implementations
from tests.pallas_kernels.implementations import IMPLEMENTATIONS, measure

CASE = "a chunk after a prefix"
# Copies as late as may be, and at once, which shows a race to the detector.
LATE = IMPLEMENTATIONS["tpu"]
EAGER = dataclasses.replace(
    LATE,
    interpreter=lambda: compat.TpuInterpretParams(detect_races=True, dma_execution_mode="eager"),
)

_Kernel = tpu_kernel._Kernel
_for_new_pages = _Kernel.for_new_pages
# What is broken -> (the method that does it, its broken self).
BROKEN: dict[str, tuple[str, Callable]] = {
    "pages are not waited for": ("wait_block", lambda self, tile, block, slot: None),
    "writes are not waited for": (
        "for_new_pages",
        lambda self, row, act: _for_new_pages(self, row, act) if act == "start" else None,
    ),
    "results are not waited for": ("wait_out", lambda self, count: None),
    "values are not masked": (
        "in_range",
        lambda self, tile, block: jnp.full((self.plan.block_tokens, self.plan.width), True),
    ),
}

RACES = ("results are not waited for",)  # of these, what the race detector is to see


def report(name: str, how: implementations.Implementation) -> None:
    """Print {name, fault}; fault is "" where all is well."""
    IMPLEMENTATIONS["tpu"] = how
    implementations._compiled.cache_clear()
    jax.clear_caches()  # the traces of the kernel before
    try:
        found = measure(CASE, "tpu", "float32")
        sound = found["out_error"] <= 2e-5 and found["pages_exact"] and found["padding_zero"]
        fault = "" if sound else f"wrong: {found}"
    except Exception as error:  # noqa: BLE001 whatever it is, the test wants to see it
        kind = "race" if "RACE DETECTED" in str(error) else type(error).__name__
        fault = f"{kind}: {error}"[:2000]
    finally:
        how.reset()
    print(json.dumps({"name": name, "fault": fault}), flush=True)


def main() -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    report("sound", LATE)
    report("sound, eager", EAGER)
    for name, (method, broken) in BROKEN.items():
        sound = getattr(_Kernel, method)
        setattr(_Kernel, method, broken)
        report(name, EAGER if name in RACES else LATE)
        setattr(_Kernel, method, sound)


if __name__ == "__main__":
    main()
