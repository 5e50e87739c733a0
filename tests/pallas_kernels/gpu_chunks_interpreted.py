"""The Hopper kernel for chunks in Pallas' interpreter, run as a program by test_gpu_chunks.py.

A missing arrival makes the interpreter hang, so it stands in a process of its own, with a time limit
set by the test. Prints one JSON object a line, as soon as a case or a control is done:

    python -m tests.pallas_kernels.gpu_chunks_interpreted cases|controls

The interpreter fills what nobody wrote with NaN and detects races, but not those of wgmma. A page,
head and tile takes it up to a tenth of a second, hence the tiny cases.
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
from pallas_kernels.ragged_paged_attention import gpu_chunks, gpu_chunks_kernel
from pallas_kernels.ragged_paged_attention.call import Rows, Scales
from tests.pallas_kernels.gpu_interpreted import fault_of
from tests.pallas_kernels.ragged_cases import Case, make_case, oracle

SCALE = 0.2
# Largest difference over the largest value of a case; 4e-3 at most was seen for out, 2e-6 for lse.
OUT_TOLERANCE, LSE_TOLERANCE = 1e-2, 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interpreted:
    """One call: rows as in `make_case`, its arguments, the options, and what may be changed in it."""

    rows: list[tuple[int, int]]
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sinks: bool = False
    change: Callable[[Case], Case] = lambda case: case

    def make(self) -> Case:
        defaults = {"page": 64, "heads": (2, 1), "head_dim": 64, "dtype": "bfloat16"}
        return self.change(make_case(self.rows, **defaults | self.arguments))


def freed_pages(case: Case) -> Case:
    """Row 0's pages before the window are gone: entry 0, the null page, whose content is poison."""
    table = case.page_table.copy().reshape(len(case.kv_lens), -1)
    table[0, :2] = 0  # slots 0 to 127; the window of 20 begins at 131
    return dataclasses.replace(case, page_table=table.reshape(-1))


CASES = {
    "lengths around a page, padding": Interpreted(
        rows=[(1, 5), (2, 40), (63, 63), (65, 130)], arguments={"num_tokens": 144, "num_rows": 6}
    ),
    "chunks of 64 and 130": Interpreted(rows=[(64, 128), (130, 300)], arguments={"heads": (1, 1)}),
    "a row without tokens, one with a token": Interpreted(
        rows=[(0, 70), (1, 9), (3, 200)], change=lambda case: all_rows(case)
    ),
    "9/3, window below a page, soft cap, sinks": Interpreted(
        rows=[(5, 70), (50, 100)],
        arguments={"heads": (9, 3), "num_tokens": 64},
        options={"window": 5, "soft_cap": 2.0},
        sinks=True,
    ),
    "mqa 4/1/128, window above the length": Interpreted(
        rows=[(2, 9), (40, 290)],
        arguments={"heads": (4, 1), "head_dim": 128},
        options={"window": 1000},
    ),
    "freed pages": Interpreted(
        rows=[(20, 170), (3, 3)], options={"window": 20}, change=freed_pages
    ),
    "kv_starts, window": Interpreted(
        rows=[(30, 400)], arguments={"starts": [192]}, options={"window": 150}
    ),
    "int8 mha 2/2/128": Interpreted(
        rows=[(2, 9), (20, 300)],
        arguments={"heads": (2, 2), "head_dim": 128, "kv_dtype": "int8"},
    ),
    "e4m3": Interpreted(rows=[(20, 300)], arguments={"kv_dtype": "float8_e4m3fn"}),
    "e5m2": Interpreted(rows=[(20, 100)], arguments={"kv_dtype": "float8_e5m2"}),
    "8/2/256": Interpreted(
        rows=[(3, 70), (20, 200)], arguments={"heads": (8, 2), "head_dim": 256}, sinks=True
    ),
    "int8 2/1/256, window": Interpreted(
        rows=[(40, 300)],
        arguments={"heads": (2, 1), "head_dim": 256, "kv_dtype": "int8"},
        options={"window": 100},
    ),
    # Padding: 25 heads to 32. Passes: 71 heads at head_dim 256 in two, of 36 heads and padding to 40.
    "25 heads on one, sinks": Interpreted(rows=[(6, 70)], arguments={"heads": (25, 1)}, sinks=True),
    "71 heads on one": Interpreted(
        rows=[(3, 66)], arguments={"heads": (71, 1), "head_dim": 256}, sinks=True
    ),
    "more tiles than programs": Interpreted(
        rows=[(20, 20), (30, 150), (70, 70), (3, 300)], arguments={"heads": (4, 1)}
    ),
    "no rows": Interpreted(rows=[], arguments={"num_tokens": 4, "num_rows": 2}),
}


def all_rows(case: Case) -> Case:
    """Every row is this kernel's, those with a token or none too."""
    return dataclasses.replace(case, ranges=np.array([0, 0, case.ranges[2]], np.int32))


def run(spec: Interpreted, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of all tokens, f64."""
    sinks = np.linspace(-1, 8, case.q.shape[1], dtype=np.float32) if spec.sinks else None
    rows = Rows(case.kv_lens, case.page_table, case.kv_starts, case.cu_q_lens, case.ranges)
    scales = Scales(case.k_scale, case.v_scale)
    out, lse = gpu_chunks.attend_chunks(
        *jax.tree.map(jnp.asarray, (case.q, case.after, rows, scales, sinks)),
        sm_scale=SCALE,
        **{"window": None, "soft_cap": None} | spec.options,
        interpret=compat.GpuInterpretParams(detect_races=True),
    )
    assert out.dtype == case.q.dtype
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    if compat.gpu_races_found():
        raise RuntimeError("RACE DETECTED")
    return out, lse


def check(spec: Interpreted) -> None:
    """Raises unless the kernel gives what a float64 softmax gives for the rows that are its own."""
    case = spec.make()
    sinks = np.linspace(-1, 8, case.q.shape[1], dtype=np.float32) if spec.sinks else None
    want = oracle(case, sm_scale=SCALE, sinks=sinks, **spec.options)
    mine = slice(case.cu_q_lens[case.ranges[0]], case.cu_q_lens[case.ranges[2]])
    for name, got, expected, tolerance in zip(
        ("out", "lse"), run(spec, case), want, (OUT_TOLERANCE, LSE_TOLERANCE), strict=True
    ):
        got, expected = got[mine], expected[mine]
        if not np.isfinite(got).all():
            raise ValueError(f"{name}: not finite")
        if got.size and not np.abs(got - expected).max() <= tolerance * np.abs(expected).max():
            raise ValueError(f"{name}: wrong by {np.abs(got - expected).max()}")


def store_whole_tiles(self, wg, tile) -> None:
    """`_Kernel.store_rows` without its care for what follows the tile."""
    r, size = self.refs, gpu_chunks_kernel.WG_ROWS
    rows = compat.ds(compat.multiple_of(tile.query_row + wg * size, 8), size)
    compat.copy_smem_to_gmem(r.queries.at[wg], r.out.at[tile.head, rows])


_make_work = gpu_chunks._make_work


def last_tile_first(*arguments):
    """`_make_work` with the tiles in reverse.

    The interpreter runs one program after the other: in the usual order a tile that writes over what
    follows it is mended by what follows.
    """
    work = _make_work(*arguments)
    order = work.num_tiles - 1 - jnp.arange(len(work.tiles), dtype=jnp.int32)
    return work._replace(
        tiles=work.tiles[jnp.maximum(order, 0)], tile=jnp.maximum(work.num_tiles - 1 - work.tile, 0)
    )


# What is broken -> (the method that does it, its broken self, what the fault is to say). A slot of the
# ring that is loaded again too early is not among them: compute reads it by wgmma, where the detector
# does not look, and whether the numbers suffer is a matter of timing.
BROKEN: dict[str, tuple[str, Callable, str]] = {
    "pages are not waited for": ("wait_landed", lambda self, landing: None, "race"),
    "values are not cleaned": ("clean", lambda self, slot, begin, end: None, "not finite"),
    # A race where the tiles are those of two programs that run at once, wrong numbers otherwise.
    "tiles are stored whole": ("store_rows", store_whole_tiles, ""),
}


def results(which: str) -> Iterator[dict[str, str]]:
    """{name, fault} of every case, or of every broken kernel; fault is "" where all is well."""
    if which == "cases":
        for name, spec in CASES.items():
            yield {"name": name, "fault": fault_of(functools.partial(check, spec))}
        return
    spec = Interpreted(rows=[(5, 270), (3, 3)], arguments={"heads": (1, 1)})
    gpu_chunks._make_work = last_tile_first
    yield {"name": "sound", "fault": fault_of(functools.partial(check, spec))}
    for name, (method, broken, _) in BROKEN.items():
        sound = getattr(gpu_chunks_kernel._Kernel, method)
        setattr(gpu_chunks_kernel._Kernel, method, broken)
        jax.clear_caches()  # the traces of the kernel before
        yield {"name": name, "fault": fault_of(functools.partial(check, spec))}
        setattr(gpu_chunks_kernel._Kernel, method, sound)


def main(which: str) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    # A warpgroup that waits holds a thread of XLA's pool, which has one for each CPU or device: with
    # two CPUs both compute warpgroups' waits would leave the memory warpgroup none.
    jax.config.update("jax_num_cpu_devices", 8)
    for result in results(which):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
