"""One class over every implementation and every case of `arg_specs.CASES`, against a float64 softmax.

Kernels of other platforms run in Pallas' interpreters, in a process of their own (see
`implementations`); with race detection, and with NaN in everything that nobody may read.
"""

import functools
import math

import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention.arg_specs import CASES
from tests.pallas_kernels import implementations
from tests.pallas_kernels.child import reports
from tests.pallas_kernels.implementations import IMPLEMENTATIONS, measure

LIMITS = {"float32": 2e-5, "bfloat16": 1e-2}
INTERPRETED_LIMIT_S = {"tpu": 280, "gpu": 800}
# Of these a kernel's bf16 form differs from its f32 form.
BF16 = ("mixed", "NaN of one row", "9 heads over 3", "mqa", "head_dim 256", "int8", "e4m3")
RUNS = {
    ("reference", "float32"): tuple(CASES),
    ("xla", "float32"): tuple(CASES),
    ("xla", "bfloat16"): BF16,
    ("cpu", "float32"): tuple(name for name, case in CASES.items() if case.kv_dtype is None),
    ("tpu", "float32"): tuple(CASES),
    ("tpu", "bfloat16"): BF16,
    ("gpu", "bfloat16"): tuple(CASES),
}
MARKS = {
    "tpu": [pytest.mark.interpret],
    "gpu": [pytest.mark.gpu_interpret, pytest.mark.timeout(900)],
}


@functools.cache
def interpreted(backend: str, dtype: str) -> dict[str, dict]:
    """Case -> what it measured; each child runs once."""
    cases, limit_s = RUNS[backend, dtype], INTERPRETED_LIMIT_S[backend]
    return reports(implementations.__name__, backend, dtype, *cases, limit_s=limit_s)


@functools.cache
def result(backend: str, dtype: str, name: str) -> dict:
    if IMPLEMENTATIONS[backend].interpreter is None:
        return measure(name, backend, dtype)
    return interpreted(backend, dtype).get(name, {"fault": "hung, or the child died"})


@pytest.mark.parametrize(
    ("backend", "dtype", "name"),
    [
        pytest.param(*run, name, marks=MARKS.get(run[0], []))
        for run, names in RUNS.items()
        for name in names
    ],
)
class TestAttention:
    def test_out_and_lse_are_those_of_a_float64_softmax(self, backend, dtype, name):
        found = result(backend, dtype, name)
        assert "fault" not in found, found["fault"]
        assert found["out_error"] <= LIMITS[dtype]
        assert found["lse_error"] <= LIMITS[dtype]

    def test_pages_hold_the_new_tokens_bit_for_bit_and_padding_gives_zeros(
        self, backend, dtype, name
    ):
        found = result(backend, dtype, name)
        assert "fault" not in found, found["fault"]
        assert found["pages_exact"]
        assert found["padding_zero"]


def test_the_measure_sees_a_wrong_result(monkeypatch):
    """The control: one key less, one value not written, NaN that was let in."""
    real = implementations.run

    def spoilt(change):
        def run(spec, case, backend):
            return change(*real(spec, case, backend))

        monkeypatch.setattr(implementations, "run", run)
        return measure("mixed", "xla", "float32")

    assert spoilt(lambda out, lse, pages: (out * 1.001, lse, pages))["out_error"] > 2e-5
    assert math.isnan(spoilt(lambda out, lse, pages: (out * np.nan, lse, pages))["out_error"])
    assert spoilt(lambda out, lse, pages: (out, lse + 1e-3, pages))["lse_error"] > 2e-5
    zeroed = spoilt(lambda out, lse, pages: (out, lse, np.nan_to_num(pages)))
    assert not zeroed["pages_exact"]
    assert not spoilt(lambda out, lse, pages: (out + 1, lse, pages))["padding_zero"]
