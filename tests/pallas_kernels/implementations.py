"""Every implementation of ragged paged attention over every case of `arg_specs.CASES`.

`measure` compares one call with a float64 softmax; test_attention.py asks for the answers. A kernel
with a wrong wait makes its interpreter hang or abort, so interpreted ones stand in a process of
their own, with a time limit set by the test, that prints one JSON object as soon as a case is done:

    python -m tests.pallas_kernels.implementations BACKEND DTYPE CASE ...
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import compat
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.arg_specs import CASES, CaseSpec
from tests.pallas_kernels.ragged_cases import array_args, case_of, make_pages, oracle

SCALE = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """How a backend is run.

    Args:
        page: tokens a page; small where it may be, so that a few tokens take several.
        blocks: small ones, so that a few tokens take several.
        interpreter: makes the parameters of Pallas' interpreter; None runs it as it is.
        races_found: whether the interpreter saw a race. reset: to be called after each run.
    """

    page: int = 4
    blocks: Any = None
    interpreter: Callable[[], Any] | None = None
    races_found: Callable[[], bool] = lambda: False
    reset: Callable[[], None] = lambda: None


def _tpu_interpreter():
    return compat.TpuInterpretParams(detect_races=True, dma_execution_mode="on_wait")


def _gpu_interpreter():
    return compat.GpuInterpretParams(detect_races=True)


IMPLEMENTATIONS = {
    "reference": Implementation(),
    "xla": Implementation(blocks=(3, ((4, 2),))),
    "cpu": Implementation(),
    "tpu": Implementation(
        blocks=(2, 4),
        interpreter=_tpu_interpreter,
        races_found=compat.tpu_races_found,
        reset=compat.reset_tpu_interpreter,
    ),
    "gpu": Implementation(
        page=64,
        interpreter=_gpu_interpreter,
        races_found=compat.gpu_races_found,
        reset=compat.reset_gpu_interpreter,
    ),
}


@functools.cache
def _compiled(backend: str, window: int | None, soft_cap: float | None):
    how = IMPLEMENTATIONS[backend]
    call = functools.partial(
        ragged_paged_attention,
        sm_scale=SCALE,
        backend=backend,
        window=window,
        soft_cap=soft_cap,
        return_lse=True,
        blocks=how.blocks,
        interpret=how.interpreter() if how.interpreter else None,
    )
    return jax.jit(call)


def run(spec: CaseSpec, case, backend: str):
    """(out f64[T, H, D], lse f64[T, H], canonical pages) as NumPy."""
    how = IMPLEMENTATIONS[backend]
    sinks = np.linspace(-1, 2, case.q.shape[1], dtype=np.float32) if spec.sinks else None
    args = array_args(case) | {"sinks": None if sinks is None else jnp.asarray(sinks)}
    call = _compiled(backend, spec.window, spec.soft_cap)
    out, kv, lse = call(jnp.asarray(case.q), kv=make_pages(case, backend), **args)
    pages = kv.gather(jnp.arange(len(case.before), dtype=jnp.int32))
    if how.races_found():
        raise RuntimeError("RACE DETECTED")
    assert out.dtype == case.q.dtype
    return np.asarray(out, np.float64), np.asarray(lse, np.float64), np.asarray(pages)


def measure(name: str, backend: str, dtype: str) -> dict[str, Any]:
    """{out_error, lse_error: relative to the largest of a token's head, pages_exact, padding_zero}."""
    spec = CASES[name]
    case = case_of(spec, page=IMPLEMENTATIONS[backend].page, dtype=dtype)
    out, lse, pages = run(spec, case, backend)
    sinks = np.linspace(-1, 2, case.q.shape[1], dtype=np.float32) if spec.sinks else None
    want, want_lse = oracle(
        case, sm_scale=SCALE, window=spec.window, soft_cap=spec.soft_cap, sinks=sinks
    )
    live = case.cu_q_lens[-1]
    sound = slice(case.cu_q_lens[1] if spec.spoilt else 0, live)
    out_scale = np.abs(want[sound]).max(axis=-1, keepdims=True)
    lse_scale = np.maximum(1, np.abs(want_lse[sound]))
    return {
        "out_error": float((np.abs(out - want)[sound] / out_scale).max(initial=0.0)),
        "lse_error": float((np.abs(lse - want_lse)[sound] / lse_scale).max(initial=0.0)),
        # By value, so that of an 8-bit float any NaN will do; the null page is nobody's.
        "pages_exact": np.array_equal(
            pages[1:].astype(np.float32), case.after[1:].astype(np.float32), equal_nan=True
        ),
        "padding_zero": not out[live:].any() and not lse[live:].any(),
    }


def main(backend: str, dtype: str, *names: str) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    # A warpgroup that waits holds a thread of XLA's pool, which has one for each CPU or device: with
    # two CPUs the waits of two warpgroups would leave the one they wait for none.
    jax.config.update("jax_num_cpu_devices", 8)
    for name in names:
        try:
            result = measure(name, backend, dtype)
        except Exception as error:  # noqa: BLE001 whatever it is, the test wants to see it
            result = {"fault": f"{type(error).__name__}: {error}"[:2000]}
        finally:
            IMPLEMENTATIONS[backend].reset()
        print(json.dumps({"name": name, **result}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
