"""The Hopper backend in Pallas' interpreter, run as a program by test_attention_gpu.py.

A missing arrival makes the interpreter hang, so it stands in a process of its own, with a time limit
set by the test. Prints one JSON object a line, as soon as a case or a control is done:

    python -m tests.pallas_kernels.gpu_interpreted cases|controls

The interpreter fills what nobody wrote with NaN and detects races, but not those of wgmma, nor page
ids out of range. A page and head takes it up to a tenth of a second, hence the tiny cases.
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
from pallas_kernels.ragged_paged_attention import (
    gpu,
    gpu_decode,
    gpu_write,
    ragged_paged_attention,
)
from tests.pallas_kernels.ragged_cases import Case, array_args, make_case, make_pages, oracle

SCALE = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interpreted:
    """One call: rows as in `make_case`, its arguments, the options, and what may be changed in it."""

    rows: list[tuple[int, int]]
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sinks: bool = False
    max_splits: int = gpu_decode.MAX_SPLITS
    change: Callable[[Case], Case] = lambda case: case

    def make(self) -> Case:
        defaults = {"page": 64, "heads": (3, 1), "head_dim": 64, "dtype": "bfloat16"}
        return self.change(make_case(self.rows, **defaults | self.arguments))


def sinks_of(spec: Interpreted, case: Case) -> np.ndarray | None:
    return np.linspace(-1, 2, case.q.shape[1], dtype=np.float32) if spec.sinks else None


def already_written(case: Case) -> Case:
    return dataclasses.replace(case, before=case.after, k_new=None, v_new=None)


def freed_pages(case: Case) -> Case:
    """The first pages of row 0, before its window: entry 0, the null page, whose content is poison."""
    table = case.page_table.copy()
    table[:2] = 0
    return dataclasses.replace(case, page_table=table)


def spoilt_row(case: Case) -> Case:
    """A live slot of row 0 holds NaN: its own result is NaN, no other row may see it."""
    place = case.page_table[0], slice(None), slice(None), 3
    case.before[place] = case.after[place] = np.nan
    return case


# The kernels of rows with one token by themselves. blocks: pages in a split.
DECODE = {
    "9/3/64, splits": Interpreted(
        rows=[(1, 300), (1, 64), (1, 65), (1, 1)],
        arguments={"heads": (9, 3), "num_rows": 6},
        options={"blocks": (2,)},
    ),
    "8 pages and a token": Interpreted(rows=[(1, 513)]),
    "128, mha": Interpreted(rows=[(1, 130), (1, 64)], arguments={"heads": (2, 2), "head_dim": 128}),
    "256": Interpreted(rows=[(1, 70)], arguments={"head_dim": 256}),
    "16 columns, 12 used": Interpreted(rows=[(1, 70)], arguments={"heads": (12, 1)}),
    "two passes of 32 columns": Interpreted(rows=[(1, 70)], arguments={"heads": (40, 1)}),
    "window below a page, freed pages, sinks": Interpreted(
        rows=[(1, 290), (1, 66), (1, 2)],
        options={"window": 3, "blocks": (1,)},
        sinks=True,
        change=freed_pages,
    ),
    "window above the length, soft cap": Interpreted(
        rows=[(1, 140)], options={"window": 1000, "soft_cap": 1.5}
    ),
    "kv_starts inside a split, a window": Interpreted(
        rows=[(1, 400), (1, 200)],
        arguments={"starts": [64, 128]},
        options={"window": 250, "blocks": (2,)},
    ),
    "larger splits": Interpreted(rows=[(1, 320)], options={"blocks": (1,)}, max_splits=2),
    "NaN of one row": Interpreted(rows=[(1, 70), (1, 66)], change=spoilt_row),
    "no rows": Interpreted(rows=[], arguments={"num_rows": 2}),
    "int8": Interpreted(
        rows=[(1, 200), (1, 3)], arguments={"heads": (4, 2), "kv_dtype": "int8"}, sinks=True
    ),
    "e4m3, 128": Interpreted(
        rows=[(1, 70)], arguments={"head_dim": 128, "kv_dtype": "float8_e4m3fn"}
    ),
    "e5m2": Interpreted(rows=[(1, 260)], arguments={"kv_dtype": "float8_e5m2"}),
}
# The whole backend.
MIXED = {
    "one token": Interpreted(rows=[(1, 65)], arguments={"num_rows": 3}),
    "no new tokens": Interpreted(rows=[(1, 70)], change=already_written),
    "single tokens and chunks": Interpreted(
        rows=[(1, 70), (0, 5), (5, 68)],
        arguments={"num_tokens": 9, "num_rows": 4, "heads": (4, 2)},
        options={"window": 20},
        sinks=True,
    ),
    "int8, single tokens and chunks": Interpreted(
        rows=[(1, 66), (9, 9)], arguments={"num_tokens": 16, "kv_dtype": "int8"}
    ),
}


def attend(spec: Interpreted, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of the backend for all tokens, as f64; raises unless its pages are bit-exact."""
    sinks = sinks_of(spec, case)
    args = array_args(case) | {"sinks": None if sinks is None else jnp.asarray(sinks)}
    call = functools.partial(
        ragged_paged_attention,
        sm_scale=SCALE,
        backend="gpu",
        return_lse=True,
        interpret=interpreter(),
        **spec.options,
    )
    out, kv, lse = jax.jit(call)(jnp.asarray(case.q), kv=make_pages(case, "gpu"), **args)
    assert out.dtype == case.q.dtype
    pages = np.asarray(kv.gather(jnp.arange(len(case.before), dtype=jnp.int32)))
    # By value, so that of an 8-bit float any NaN will do; the null page is nobody's.
    np.testing.assert_array_equal(pages[1:].astype(np.float32), case.after[1:].astype(np.float32))
    return finish(out, lse)


def decode(spec: Interpreted, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of `gpu_decode.decode_rows` for the live rows, as f64."""
    rows = len(case.kv_lens)
    q = np.zeros((rows, *case.q.shape[1:]), case.q.dtype)
    live = min(int(case.ranges[0]), rows)
    q[:live] = case.q[:live]
    plan = gpu.make_plan(q, make_pages(case, "gpu"), interpreted=True, **spec.options)
    ones = np.ones(plan.num_kv_heads, np.float32)
    k_scale = ones if case.k_scale is None else case.k_scale
    arrays = (
        q,
        case.after,
        case.kv_lens,
        case.page_table.reshape(rows, -1),
        case.kv_starts,
        case.ranges[0],
        k_scale * np.float32(SCALE),
        ones if case.v_scale is None else case.v_scale,
        sinks_of(spec, case),
    )
    call = functools.partial(gpu_decode.decode_rows, plan=plan, interpret=interpreter())
    out, lse = finish(*jax.jit(call)(*jax.tree.map(jnp.asarray, arrays)))
    return out[:live], lse[:live]


def interpreter() -> Any:
    return compat.GpuInterpretParams(detect_races=True)


def finish(*results: jax.Array) -> Any:
    """A tuple of them as f64; raises where there was a race."""
    done = tuple(np.asarray(result, np.float64) for result in results)
    if compat.gpu_races_found():
        raise RuntimeError("RACE DETECTED")
    return done


def check(run: Callable, spec: Interpreted) -> None:
    """Raises unless `run` gives what a float64 softmax gives.

    What bf16 costs is in proportion to a row of values, not to each of them: 1e-2 of the largest.
    """
    case = spec.make()
    gpu_decode.MAX_SPLITS = spec.max_splits
    out, lse = run(spec, case)
    want, want_lse = oracle(case, sm_scale=SCALE, sinks=sinks_of(spec, case), **softmax(spec))
    scale = np.nanmax(np.abs(want), initial=1)
    np.testing.assert_allclose(out, want[: len(out)], atol=1e-2 * scale, rtol=0)
    np.testing.assert_allclose(lse, want_lse[: len(lse)], atol=1e-5, rtol=1e-5)


def softmax(spec: Interpreted) -> dict[str, Any]:
    """The options that change the result by more than rounding."""
    return {name: value for name, value in spec.options.items() if name != "blocks"}


def check_neighbours() -> None:
    """Raises unless a row alone, in a table just wide enough, gives the same bits as in a batch."""
    spec = Interpreted(
        rows=[(1, 200), (1, 330), (1, 64)],
        arguments={"heads": (4, 2), "num_rows": 4, "pages_per_row": 9},
        options={"blocks": (2,)},
    )
    case = spec.make()
    together = decode(spec, case)
    alone = dataclasses.replace(
        case,
        q=case.q[1:2],
        kv_lens=case.kv_lens[1:2],
        kv_starts=case.kv_starts[1:2],
        page_table=case.page_table.reshape(4, -1)[1, :6],
        ranges=np.array([1, 1, 1], np.int32),
    )
    for one, many in zip(decode(spec, alone), together, strict=True):
        np.testing.assert_array_equal(one[0], many[1])


def check_write(dtype: str) -> None:
    """Raises unless live tokens are in their slots and nothing else has changed."""
    case = make_case(
        [(1, 70), (1, 64), (9, 66)],
        page=64,
        heads=(6, 3),
        head_dim=64,
        dtype="bfloat16",
        kv_dtype=dtype,
        num_tokens=14,
    )
    pairs = [(int(i[0]), int(i[3])) for i in np.argwhere(changed(case)) if i[1] == i[2] == 0]
    pairs = sorted({(page, slot) for page, slot in pairs})
    new = np.stack([case.after[page, :, :, slot] for page, slot in pairs])
    padding = np.full((3, *new.shape[1:]), 1, new.dtype)
    slots = np.array(pairs + [(0, 0)] * 3, np.int32)
    write = functools.partial(gpu_write.write_tokens, interpret=interpreter())
    arrays = (case.before, np.concatenate([new, padding]), *slots.T, np.array([len(new)], np.int32))
    pages = np.asarray(jax.jit(write)(*map(jnp.asarray, arrays)), np.float64)
    finish()
    np.testing.assert_array_equal(pages, case.after.astype(np.float64))


def changed(case: Case) -> np.ndarray:
    """bool[N, K, 2, page, D]: what the new tokens change."""
    before, after = case.before.astype(np.float32), case.after.astype(np.float32)
    return (before != after) & ~(np.isnan(before) & np.isnan(after))


CHECKS: dict[str, Callable[[], None]] = {
    **{f"decode: {name}": functools.partial(check, decode, spec) for name, spec in DECODE.items()},
    **{f"attend: {name}": functools.partial(check, attend, spec) for name, spec in MIXED.items()},
    "neighbours": check_neighbours,
    "write: bfloat16": functools.partial(check_write, "bfloat16"),
    "write: int8": functools.partial(check_write, "int8"),
}

LONG = Interpreted(rows=[(1, 350), (1, 300)], options={"blocks": (1,)})
check_long = functools.partial(check, decode, LONG)


def not_waited(self, n):
    return jax.lax.rem(n, jnp.int32(self.full.shape[0]))


# What is broken -> (where, the function, its broken self, a check that it cannot pass).
BROKEN: dict[str, tuple[Any, str, Callable, Callable[[], None]]] = {
    "pages are not waited for": (gpu_decode._Decode, "full_slot", not_waited, check_long),
    "pages are overwritten": (gpu_decode._Decode, "free_slot", not_waited, check_long),
    "partials are not waited for": (gpu_decode._Merge, "full_slot", not_waited, check_long),
    "values are not masked": (gpu_decode._Decode, "clear_unseen", lambda *_: None, check_long),
    "new tokens are not waited for": (
        compat,
        "barrier_wait",
        lambda barrier: None,
        CHECKS["write: bfloat16"],
    ),
}
RACES = ("pages are not waited for", "partials are not waited for", "new tokens are not waited for")


def results(which: str) -> Iterator[dict[str, str]]:
    """{name, fault} of every check, or of every broken kernel; fault is "" where all is well."""
    if which == "cases":
        for name, do in CHECKS.items():
            yield {"name": name, "fault": fault_of(do)}
        return
    yield {"name": "sound", "fault": fault_of(check_long)}
    for name, (where, attribute, broken, do) in BROKEN.items():
        sound = getattr(where, attribute)
        setattr(where, attribute, broken)
        jax.clear_caches()  # the traces of the kernel before
        yield {"name": name, "fault": fault_of(do)}
        setattr(where, attribute, sound)


def fault_of(do: Callable[[], None]) -> str:
    """What went wrong, in short."""
    try:
        do()
    except Exception as error:  # noqa: BLE001 whatever it is, the test wants to see it
        race = "RACE DETECTED" in str(error) or compat.gpu_races_found()
        return f"{'race' if race else type(error).__name__}: {error}"[:2000]
    finally:
        compat.reset_gpu_interpreter()
    return ""


def main(which: str) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    for result in results(which):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
