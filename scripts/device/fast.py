"""How fast are the kernels on this device? Against its own copy and matrix product, in the same run."""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention import KVPages, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.arg_specs import HeadSpec, StepSpec
from scripts.device.report import Deadline, Row
from scripts.device.timing import seconds_per_call

NUM_LAYERS = 4  # pools in one program, so that starting it is no part of a layer's time


def copy_gb_per_s(num_bytes: int) -> float:
    """Bytes read and written by adding 1 to a large array, in GB/s."""
    x = jnp.zeros(num_bytes // 4, jnp.int32)
    add = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / seconds_per_call(lambda: add(x), repetitions=10) / 1e9


def matmul_tflop_per_s(size: int, dtype: str) -> float:
    """A square matrix product, in TFLOP/s."""
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (size, size), jnp.float32).astype(dtype) for key in keys)
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / seconds_per_call(lambda: product(a, b), repetitions=10) / 1e12


def layer_seconds(
    backend: str, step: StepSpec, heads: HeadSpec, dtype: str, page_size: int
) -> float:
    """Seconds of one layer's attention, the write of the new tokens included."""
    rng = np.random.default_rng(0)
    rows = {name: jnp.asarray(a) for name, a in step.rows(page_size, rng).items()}
    num_tokens = step.num_rows * step.num_tokens
    shapes = [
        (num_tokens, count, heads.head_dim)
        for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    ]
    tokens = [
        jax.random.normal(jax.random.key(i), shape, jnp.float32).astype(dtype)
        for i, shape in enumerate(shapes)
    ]
    pools = [
        KVPages.zeros(
            dispatch.layout_of(backend),
            rows["page_table"].size + 1,
            page_size,
            heads.num_kv_heads,
            heads.head_dim,
            dtype,
        )
        for _ in range(NUM_LAYERS)
    ]

    @functools.partial(jax.jit, donate_argnums=0)
    def layers(pools, q, k, v, rows):
        written = []
        for kv in pools:
            q, kv, _ = ragged_paged_attention(
                q, k, v, kv, **rows, sm_scale=heads.head_dim**-0.5, backend=backend
            )
            written.append(kv)
        return q, written

    state = [pools]

    def call():
        q, state[0] = layers(state[0], *tokens, rows)
        return q

    return seconds_per_call(call, repetitions=10) / NUM_LAYERS


def time_steps(
    backends: list[str],
    steps: dict[str, StepSpec],
    heads: HeadSpec,
    *,
    dtype: str,
    page_size: int,
    copy: float,
    matmul: float,
    deadline: Deadline,
) -> Iterator[Row]:
    """GB/s of single tokens against the copy, TFLOP/s of chunks against the matrix product."""
    peer = torch_seconds(steps, heads, dtype)
    for name, step in steps.items():
        is_decode = step.num_tokens == 1
        part = "decode" if is_decode else "chunk"
        arms = {**dict.fromkeys(backends), "torch sdpa": peer.get(name)}
        for arm, seconds in arms.items():
            figures: dict[str, object] = {}
            if arm in backends:
                if deadline.left_s() < 0:
                    yield Row(part=part, name=f"{name} {arm}", figures={"skipped": "out of time"})
                    continue
                seconds = layer_seconds(arm, step, heads, dtype, page_size)
            elif seconds is None:
                yield Row(part=part, name=f"{name} {arm}", figures={"skipped": peer["why"]})
                continue
            figures["ms"] = seconds * 1e3
            if is_decode:
                figures["gb_per_s"] = kv_bytes(step, heads, dtype) / seconds / 1e9
                figures["of_copy"] = figures["gb_per_s"] / copy
            else:
                figures["tflop_per_s"] = causal_flop(step, heads) / seconds / 1e12
                figures["of_matmul"] = figures["tflop_per_s"] / matmul
            yield Row(part=part, name=f"{name} {arm}", figures=figures)


def kv_bytes(step: StepSpec, heads: HeadSpec, dtype: str) -> int:
    """Keys and values that a step must read in one layer."""
    element = jnp.dtype(dtype).itemsize
    return 2 * step.num_rows * step.context * heads.num_kv_heads * heads.head_dim * element


def causal_flop(step: StepSpec, heads: HeadSpec) -> float:
    """Operations of scores and values over what the causal mask leaves, in one layer."""
    seen = step.num_tokens * (step.context - (step.num_tokens - 1) / 2)
    return 4.0 * step.num_rows * seen * heads.num_heads * heads.head_dim


def torch_seconds(steps: dict[str, StepSpec], heads: HeadSpec, dtype: str) -> dict:
    """Step -> seconds of scaled_dot_product_attention over dense keys; {"why": ..} where torch is not."""
    shapes = {name: [step.num_rows, step.num_tokens, step.context] for name, step in steps.items()}
    request = {"shapes": shapes, "dtype": dtype, "heads": [*vars(heads).values()][:3]}
    worker = Path(__file__).parent / "torch_attention.py"
    done = subprocess.run(
        [sys.executable, worker],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"why": (done.stderr.strip().splitlines() or ["no torch"])[-1]}
    return json.loads(done.stdout)
