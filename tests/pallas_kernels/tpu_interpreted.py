"""The TPU kernel in Pallas' interpreter, run as a program by test_attention_tpu.py.

A wrong wait makes the interpreter hang or abort, so it stands in a process of its own, with a time
limit set by the test. Prints one JSON object a line, as soon as a case or a control is done:

    python -m tests.pallas_kernels.tpu_interpreted cases|controls

The interpreter fills what nobody wrote with NaN, refuses to read out of bounds and detects races.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import compat
from pallas_kernels.ragged_paged_attention import ragged_paged_attention, tpu_kernel
from tests.pallas_kernels.ragged_cases import Case, array_args, make_case, make_pages, oracle

SCALE = 0.2
SINKS = np.linspace(-1, 2, 4, dtype=np.float32)
MIXED = [(1, 8), (1, 3), (2, 9), (9, 21)]
SHORT = [(1, 9), (6, 13)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interpreted:
    """One call: rows as in `make_case`, its arguments, the options, and what may be changed in it."""

    rows: list[tuple[int, int]]
    arguments: dict[str, Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sinks: np.ndarray | None = None
    blocks: tuple[int, int] | None = (2, 4)  # two pages of 4, tiles of 4 tokens
    change: Callable[[Case], Case] = lambda case: case
    copies: str = (
        "on_wait"  # as late as may be; "eager": at once, which shows a race to the detector
    )

    def make(self) -> Case:
        defaults = {"heads": (4, 2), "head_dim": 64, "num_tokens": 16, "num_rows": 5}
        return self.change(make_case(self.rows, **defaults | self.arguments))


def freed_pages(case: Case) -> Case:
    """The pages before the window are gone: entry 0, the null page, whose content is poison."""
    table = case.page_table.copy().reshape(5, -1)
    table[:2, :2] = 0  # slots 0 to 7; the window of 3 begins at 14 and 11
    return dataclasses.replace(case, page_table=table.reshape(-1))


def already_written(case: Case) -> Case:
    return dataclasses.replace(case, before=case.after, k_new=None, v_new=None)


def spoilt_row(case: Case) -> Case:
    """A live slot of row 0 holds NaN: its own result is NaN, no other row may see it."""
    place = case.page_table[1], slice(None), slice(None), 3
    case.before[place] = case.after[place] = np.nan
    return case


CASES = {
    "NaN of one row": Interpreted(rows=[(1, 16), (1, 3), (6, 9)], arguments={}, change=spoilt_row),
    "f32 9/3/64": Interpreted(rows=MIXED, arguments={"heads": (9, 3)}),
    "bf16 9/3/64": Interpreted(rows=MIXED, arguments={"heads": (9, 3), "dtype": "bfloat16"}),
    "bf16 mha 3/3/128": Interpreted(
        rows=SHORT, arguments={"heads": (3, 3), "head_dim": 128, "dtype": "bfloat16"}
    ),
    "f32 mqa 4/1/256": Interpreted(rows=SHORT, arguments={"heads": (4, 1), "head_dim": 256}),
    "window, soft cap, sinks, a row without tokens": Interpreted(
        rows=[(1, 9), (1, 13), (0, 5), (7, 18)],
        arguments={},
        sinks=SINKS,
        options={"window": 5, "soft_cap": 1.5},
    ),
    "kv_starts, window above the length": Interpreted(
        rows=[(1, 30), (1, 3), (5, 40)],
        arguments={"starts": [24, 0, 20]},
        options={"window": 100},
    ),
    "freed pages, window below a page": Interpreted(
        rows=[(1, 17), (5, 18)],
        arguments={},
        options={"window": 3},
        blocks=(4, 4),
        change=freed_pages,
    ),
    "int8 9/3/64": Interpreted(rows=SHORT, arguments={"heads": (9, 3), "kv_dtype": "int8"}),
    "e4m3, bf16 queries": Interpreted(
        rows=SHORT,
        arguments={"head_dim": 128, "kv_dtype": "float8_e4m3fn", "dtype": "bfloat16"},
    ),
    "e5m2": Interpreted(rows=SHORT, arguments={"kv_dtype": "float8_e5m2"}),
    "no new tokens, our blocks": Interpreted(
        rows=SHORT, arguments={}, blocks=None, change=already_written
    ),
    "no rows": Interpreted(rows=[], arguments={}),
}


def run(spec: Interpreted, case: Case, backend: str = "tpu"):
    """(out, lse, pages) as NumPy; out and lse f64."""
    options = dict(spec.options)
    if backend == "tpu":
        parameters = compat.TpuInterpretParams(detect_races=True, dma_execution_mode=spec.copies)
        options |= {"blocks": spec.blocks, "interpret": parameters}
    args = array_args(case) | {"sinks": None if spec.sinks is None else jnp.asarray(spec.sinks)}
    call = functools.partial(
        ragged_paged_attention, sm_scale=SCALE, backend=backend, return_lse=True, **options
    )
    out, kv, lse = jax.jit(call)(jnp.asarray(case.q), kv=make_pages(case, backend), **args)
    assert out.dtype == case.q.dtype
    pages = kv.gather(jnp.arange(len(case.before), dtype=jnp.int32))
    if compat.tpu_races_found():
        raise RuntimeError("RACE DETECTED")
    return np.asarray(out, np.float64), np.asarray(lse, np.float64), np.asarray(pages)


def check(spec: Interpreted) -> None:
    """Raises unless the kernel gives what a float64 softmax gives, and its pages are bit-exact."""
    case = spec.make()
    out, lse, pages = run(spec, case)
    want, want_lse = oracle(case, sm_scale=SCALE, sinks=spec.sinks, **spec.options)
    tolerance = 1e-2 if case.q.dtype.name == "bfloat16" else 3e-6
    np.testing.assert_allclose(out, want, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, want_lse, atol=5e-6, rtol=5e-6)
    # By value, so that of an 8-bit float any NaN will do; the null page is nobody's.
    np.testing.assert_array_equal(pages[1:].astype(np.float32), case.after[1:].astype(np.float32))


def check_reference(spec: Interpreted) -> None:
    """Raises unless the kernel gives what reference.py gives."""
    case = spec.make()
    for got, want in zip(run(spec, case)[:2], run(spec, case, "reference")[:2], strict=True):
        np.testing.assert_allclose(got, want, atol=5e-6, rtol=5e-6)


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


def results(which: str) -> Iterator[dict[str, str]]:
    """{name, fault} of every case, or of every broken kernel; fault is "" where all is well."""
    if which == "cases":
        yield {"name": "reference", "fault": fault_of(check_reference, CASES["f32 9/3/64"])}
        for name, spec in CASES.items():
            yield {"name": name, "fault": fault_of(check, spec)}
        return
    spec = Interpreted(rows=SHORT, arguments={})
    eager = dataclasses.replace(spec, copies="eager")
    yield {"name": "sound", "fault": fault_of(check, spec)}
    yield {"name": "sound, eager", "fault": fault_of(check, eager)}
    for name, (method, broken) in BROKEN.items():
        sound = getattr(_Kernel, method)
        setattr(_Kernel, method, broken)
        jax.clear_caches()  # the traces of the kernel before
        yield {"name": name, "fault": fault_of(check, eager if name in RACES else spec)}
        setattr(_Kernel, method, sound)


def fault_of(do: Callable[[Interpreted], None], spec: Interpreted) -> str:
    """What went wrong, in short."""
    try:
        do(spec)
    except Exception as error:  # noqa: BLE001 whatever it is, the test wants to see it
        kind = "race" if "RACE DETECTED" in str(error) else type(error).__name__
        return f"{kind}: {error}"[:2000]
    finally:
        compat.reset_tpu_interpreter()
    return ""


def main(which: str) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    for result in results(which):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
