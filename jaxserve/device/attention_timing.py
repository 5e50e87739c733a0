"""Attention alone, timed as a model embeds it: unrolled layers, a donated pool for each, one program.

Used by `jaxserve bench kernels`. Invariant: the arms of a step take turns, so that a machine that slows
down slows all of them.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.device.dtypes import resolve_dtype
from jaxserve.errors import ConfigError
from jaxserve.plan.roofline import num_pairs
from pallas_kernels import dispatch
from pallas_kernels.page_bytes import page_bytes
from pallas_kernels.ragged_paged_attention import KVPages, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.arg_specs import HeadSpec, StepSpec

_LOG = logging.getLogger(__name__)


class Plan(NamedTuple):
    """What is timed, once "auto" has been answered.

    Args:
        backends: names in dispatch.BACKENDS; the first is what the others are compared with.
        dtype: of queries and pages.
        page_size: tokens a page.
    """

    backends: list[str]
    dtype: str
    page_size: int


class ArmTimes(NamedTuple):
    """One backend's seconds: each step, and compiling it."""

    step_s: list[float]
    compile_s: float


def plan_arms(
    backends: Sequence[str], *, dtype: str, page_size: int | None, heads: HeadSpec
) -> Plan:
    """Finds out what can be timed here.

    Args:
        backends: names; none = all that "auto" may choose on this platform and that serve.
        dtype: a name, or "auto".
        page_size: tokens a page; None = the first backend's own.
        heads: the model's.

    Raises:
        ConfigError: a backend that is not there or does not serve this, or a page size.
    """
    device = jax.devices()[0]
    dtype = resolve_dtype(dtype).name
    demand = dispatch.Demand(
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", None),
        dtype=dtype,
        kv_dtype=dtype,
        head_dim=heads.head_dim,
    )
    try:
        candidates = dispatch.AUTO[device.platform]
        found = list(backends) or [
            name for name in candidates if dispatch.refusal(name, demand) is None
        ]
        for name in found:
            dispatch.layout_of(name)  # "auto" is none: arms have names
            dispatch.resolve_backend(name, demand)
        if page_size is None:
            page_size = dispatch.pick_page_size(found[0], max_num_seqs=1, max_model_len=1)
        for name in found:
            dispatch.check_page_size(name, page_size)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(str(error)) from None
    return Plan(found, dtype, page_size)


def time_attention(
    plan: Plan, step: StepSpec, heads: HeadSpec, *, num_layers: int, repetitions: int
) -> dict[str, ArmTimes]:
    """Times one step shape with every backend of the plan, in turns."""
    arms = {name: _Arm(name, plan, step, heads, num_layers) for name in plan.backends}
    times = {name: ArmTimes([], arm.compile_s) for name, arm in arms.items()}
    for _ in range(repetitions):
        for name, arm in arms.items():
            times[name].step_s.append(arm.run())
    return times


def least_work(plan: Plan, step: StepSpec, heads: HeadSpec, *, num_layers: int) -> tuple[int, int]:
    """(bytes, operations) that no implementation of this step can avoid: whole pages of the context
    are read, and each query is multiplied with the keys and values that it sees.
    """
    pages = step.num_rows * -(-step.context // plan.page_size)
    one = page_bytes("split", plan.page_size, heads.num_kv_heads, heads.head_dim, plan.dtype)
    pairs = step.num_rows * num_pairs(step.context - step.num_tokens, step.num_tokens)
    return num_layers * pages * one, num_layers * 4 * heads.num_heads * heads.head_dim * pairs


class _Arm:
    """One backend's program for one step shape, compiled and run once."""

    def __init__(self, name: str, plan: Plan, step: StepSpec, heads: HeadSpec, num_layers: int):
        self._batch = step.rows(plan.page_size, np.random.default_rng(0))
        shape = (heads.num_kv_heads, heads.head_dim)
        queries = (heads.num_heads, heads.head_dim)
        self._tokens = [
            jax.random.normal(key, (step.num_rows * step.num_tokens, *tail), plan.dtype)
            for key, tail in zip(
                jax.random.split(jax.random.key(0), 3), (queries, shape, shape), strict=True
            )
        ]
        layout, num_pages = dispatch.layout_of(name), self._batch["page_table"].size + 1
        self._pools = [
            KVPages.zeros(layout, num_pages, plan.page_size, *shape, plan.dtype)
            for _ in range(num_layers)
        ]
        begin = time.perf_counter()
        model = _model(name, heads.head_dim**-0.5)
        jitted = jax.jit(model, donate_argnums=0)
        self._compiled = jitted.lower(self._pools, *self._tokens, self._batch).compile()
        self.compile_s = time.perf_counter() - begin
        _LOG.info("  %s: compiled in %.1f s", name, self.compile_s)
        self.run()

    def run(self) -> float:
        """Seconds of one step."""
        begin = time.perf_counter()
        out, self._pools = self._compiled(self._pools, *self._tokens, self._batch)
        jax.block_until_ready((out, self._pools))
        return time.perf_counter() - begin


def _model(backend: str, sm_scale: float) -> Callable[..., tuple[jax.Array, list[KVPages]]]:
    def model(
        pools: list[KVPages], x: jax.Array, k: jax.Array, v: jax.Array, batch: Mapping[str, Any]
    ) -> tuple[jax.Array, list[KVPages]]:
        written = []
        for kv in pools:
            x, kv, _ = ragged_paged_attention(
                x, k, v, kv, **batch, sm_scale=sm_scale, backend=backend
            )
            written.append(kv)
        return x, written

    return model
