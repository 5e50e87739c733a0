"""Whole models that are compiled for a target, and the rows about them.

Used by the workers. Invariant: the programs are those of `jaxserve.device.aot`, which `jaxserve plan`
compiles too; what stands here is which models, how much of them and how large a pool.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.device import aot
from jaxserve.device.aot_target import Target
from jaxserve.device.step_shapes import StepShapes
from jaxserve.model_config import ModelConfig
from jaxserve.schedule.buckets import Buckets
from pallas_kernels import dispatch
from pallas_kernels.page_bytes import page_bytes
from scripts.models import LLAMA_3_8B, LLAMA_3_70B

DTYPE = jnp.dtype("bfloat16")
MODELS = {"llama-3-8b": LLAMA_3_8B, "llama-3-70b": LLAMA_3_70B}
# 256 sequences of up to 8192 tokens, 512 tokens in a step, every sequence sampled.
BUCKETS = Buckets(max_num_seqs=256, max_num_batched_tokens=512, tokens=(512,), rows=(256,))
MAX_MODEL_LEN = 8192
# Of each layer on each device: more than the 128 MiB that XLA might prefetch into VMEM whole.
POOL_BYTES = 160 * 2**20
# Left for temporaries where the depth is chosen by what fits.
SPARE_BYTES = 2 * 2**30


def step_shapes(config: ModelConfig, backend: str, target: Target) -> StepShapes:
    """What the executor would compile for a model shared by the target's devices."""
    page_size = dispatch.pick_page_size(
        backend, max_num_seqs=BUCKETS.max_num_seqs, max_model_len=MAX_MODEL_LEN
    )
    kv_heads = aot.shared_config(config, target.num_devices).num_kv_heads // target.num_devices
    layout = dispatch.layout_of(backend)
    one_page = page_bytes(layout, page_size, kv_heads, config.head_dim, DTYPE.name)
    return aot.step_shapes(
        config,
        target,
        backend=backend,
        buckets=BUCKETS,
        max_model_len=MAX_MODEL_LEN,
        page_size=page_size,
        num_pages=POOL_BYTES // one_page + 1,
        dtype=DTYPE,
        kv_dtype=DTYPE,
    )


def pick_depth(name: str, layers: str, backend: str, target: Target, hbm_bytes: int) -> int:
    """Layers to compile.

    Args:
        name: of the model.
        layers: a number, or "all" for as many as the model has and HBM holds.
        backend: of attention.
        target: the devices.
        hbm_bytes: of each.
    """
    config = MODELS[name]
    if layers != "all":
        return min(int(layers), config.num_layers)
    one, rest = aot.layer_bytes(step_shapes(config, backend, target))
    return min(config.num_layers, (hbm_bytes - SPARE_BYTES - rest) // one)


def row_name(name: str, depth: int, target: Target) -> str:
    """What a row is called: the model, how many of its layers, how many devices share it."""
    shared = f" tp{target.num_devices}" if target.num_devices > 1 else ""
    return f"{name} {depth} of {MODELS[name].num_layers} layers{shared}"


def compile_step(
    name: str,
    depth: int,
    backend: str,
    target: Target,
    *,
    look: Callable[[jax.stages.Compiled], None] = lambda compiled: None,
) -> dict:
    """One row of the report.

    Args:
        name: of the model.
        depth: layers to compile.
        backend: of attention.
        target: the devices.
        look: is shown each compiled program.

    Returns:
        Bytes of each device; "full_gib" is "hbm_mib" with params and pages of the missing layers
        added, which a program of full depth holds besides; "collectives" by program.
    """
    shapes = step_shapes(aot.first_layers(MODELS[name], depth), backend, target)
    step = aot.compile_step(shapes, target, look=look)
    if not step.hbm_bytes:
        return {"fault": step.fault}
    missing = MODELS[name].num_layers - depth
    return {
        "hbm_mib": step.hbm_bytes / 2**20,
        "full_gib": (step.hbm_bytes + missing * step.layer_bytes) / 2**30,
        "temp_mib": step.temp_bytes / 2**20,
        "code_kib": step.code_bytes / 2**10,
        "compile_s": step.compile_s,
        "collectives": aot.describe(step.collectives),
        "fault": step.fault,
    }
