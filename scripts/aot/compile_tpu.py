"""Compiles attention for one TPU that is not there; started by scripts/tpu_aot in its environment.

Prints one JSON object a line. A row's "fault" is "" where all is well.
"""

import argparse
import dataclasses
import functools
import json
import math
import re
import time

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from pallas_kernels import compat
from pallas_kernels.page_bytes import page_bytes
from pallas_kernels.ragged_paged_attention import (
    KVPages,
    arg_specs,
    ragged_paged_attention,
    tpu,
)

PAGE_SIZE = 32
# Above this a pool stays in HBM: XLA prefetches smaller arrays into VMEM whole, a copy of no concern.
MIN_POOL_BYTES = 256 * 2**20
# 256 sequences of up to 8192 tokens of context, 512 tokens in a step.
SERVE = {"serve-256x8192": arg_specs.StepSpec(num_rows=256, num_tokens=2, context=8192)}
STEPS = {**arg_specs.STEPS, **SERVE}
DEFAULT_HEADS = "smollm2-135m,llama-3.2-1b,llama-3.1-8b"
DEFAULT_STEPS = "decode-b32-c256,chunk-512-c2048,serve-256x8192"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """One call to compile.

    Args:
        heads: (H, K, D).
        step: how many rows, tokens and keys.
        kv_dtype: element type of the pool.
        dtype: of queries and new tokens.
        writes: whether there are new tokens; without them the pool is only read.
        sinks: whether there are sinks.
        options: keyword arguments of `ragged_paged_attention`.
    """

    heads: tuple[int, int, int]
    step: arg_specs.StepSpec = arg_specs.STEPS["chunk-8x64"]
    kv_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    writes: bool = True
    sinks: bool = False
    options: dict = dataclasses.field(default_factory=dict)


EVERYTHING = {"window": 100, "soft_cap": 30.0, "return_lse": True}
# What the named shapes do not reach: every head_dim, group, element type and option once or more.
VARIANTS = {
    "f32 9/3/64": Attention(heads=(9, 3, 64), kv_dtype="float32", dtype="float32"),
    "f32 8/2/256": Attention(heads=(8, 2, 256), kv_dtype="float32", dtype="float32"),
    "bf16 8/2/256": Attention(heads=(8, 2, 256), options=EVERYTHING),
    "mha f32 12/12/64": Attention(heads=(12, 12, 64), kv_dtype="float32", dtype="float32"),
    "mha bf16 16/16/128": Attention(heads=(16, 16, 128), sinks=True),
    "mqa bf16 32/1/128": Attention(heads=(32, 1, 128)),
    "int8 32/8/128 all options": Attention(
        heads=(32, 8, 128), kv_dtype="int8", sinks=True, options=EVERYTHING
    ),
    "int8 9/3/64": Attention(heads=(9, 3, 64), kv_dtype="int8"),
    "e4m3 32/8/128": Attention(heads=(32, 8, 128), kv_dtype="float8_e4m3fn"),
    "e5m2 8/4/64, f32 queries": Attention(
        heads=(8, 4, 64), kv_dtype="float8_e5m2", dtype="float32"
    ),
    "bf16 pool, f32 queries": Attention(heads=(8, 2, 128), dtype="float32"),
    "read only": Attention(heads=(32, 8, 64), writes=False, options={"return_lse": True}),
    "one token": Attention(
        heads=(9, 3, 64), step=arg_specs.StepSpec(num_rows=1, num_tokens=1, context=512)
    ),
}


class Chip:
    """One device of a topology, to compile for.

    Args:
        topology: its name to libtpu, such as "v5e:2x2".
    """

    def __init__(self, topology: str):
        device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
        self.sharding = jax.sharding.SingleDeviceSharding(device)
        abstract = jax.sharding.AbstractDevice(
            device_kind=device.device_kind,
            num_cores=getattr(device, "num_cores", 1),
            platform="tpu",
        )
        self.mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=abstract)

    def array(self, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        """An abstract array on the chip."""
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=self.sharding)

    def compile(self, function, *arguments, donate: tuple[int, ...]):
        """(compiled, seconds)."""
        begin = time.monotonic()
        with jax.sharding.use_abstract_mesh(self.mesh):
            lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
        return lowered.compile(), time.monotonic() - begin


def look_at(compiled, pool: jax.ShapeDtypeStruct, *, writes: bool = True) -> dict:
    """Bytes, and whether the pool was updated in place, or read, without a copy as large as it."""
    memory = compiled.memory_analysis()
    shapes = re.findall(r"\[([\d,]+)\]\S* copy(?:-start)?\(", compiled.as_text())
    copies = sum(math.prod(map(int, shape.split(","))) >= pool.size for shape in shapes)
    faults = []
    if memory.alias_size_in_bytes != writes * pool.size * pool.dtype.itemsize:
        faults.append(f"{memory.alias_size_in_bytes} bytes updated in place, not the pool")
    if copies:
        faults.append(f"{copies} copies as large as the pool")
    hbm = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    return {
        "hbm_mib": hbm / 2**20,
        "temp_mib": memory.temp_size_in_bytes / 2**20,
        "code_kib": memory.generated_code_size_in_bytes / 2**10,
        "fault": "; ".join(faults),
    }


def attention_arguments(chip: Chip, case: Attention) -> dict:
    """Abstract arguments of one layer's call, in order."""
    num_heads, kv_heads, head_dim = case.heads
    rows, num_tokens = case.step.num_rows, case.step.num_rows * case.step.num_tokens
    one_page = page_bytes("tpu", PAGE_SIZE, kv_heads, head_dim, case.kv_dtype)
    num_pages = MIN_POOL_BYTES // one_page + 1
    kv = KVPages.abstract("tpu", num_pages, PAGE_SIZE, kv_heads, head_dim, case.kv_dtype)
    new = chip.array((num_tokens, kv_heads, head_dim), case.dtype) if case.writes else None
    i32 = functools.partial(chip.array, dtype="int32")
    scale = chip.array((kv_heads,), "float32") if kv.dtype.itemsize == 1 else None
    return {
        "q": chip.array((num_tokens, num_heads, head_dim), case.dtype),
        "k_new": new,
        "v_new": new,
        "kv": jax.tree.map(lambda a: chip.array(a.shape, a.dtype), kv),
        "kv_lens": i32((rows,)),
        "page_table": i32((rows * -(-case.step.context // PAGE_SIZE),)),
        "kv_starts": i32((rows,)),
        "cu_q_lens": i32((rows + 1,)),
        "ranges": i32((3,)),
        "k_scale": scale,
        "v_scale": scale,
        "sinks": chip.array((num_heads,), "float32") if case.sinks else None,
    }


def needs(case: Attention, arguments: dict) -> dict:
    """What the kernel says of its own memory."""
    options = {"window": None, "soft_cap": None, "return_lse": False} | case.options
    plan = tpu.make_plan(
        arguments["q"],
        arguments["kv"],
        num_rows=case.step.num_rows,
        num_entries=arguments["page_table"].size,
        has_sinks=case.sinks,
        writes=case.writes,
        interpreted=False,
        **options,
    )
    smem = tpu.smem_bytes(case.step.num_rows, plan.pages_per_row, plan.num_kv_heads)
    return {"vmem_mib": tpu.vmem_bytes(plan) / 2**20, "smem_kib": smem / 2**10}


def compile_attention(chip: Chip, case: Attention) -> dict:
    """One row of the report."""
    arguments = attention_arguments(chip, case)
    row = needs(case, arguments)

    def call(*arrays):
        out, kv, lse = ragged_paged_attention(
            *arrays, sm_scale=case.heads[2] ** -0.5, backend="tpu", **case.options
        )
        return out, lse, (kv if case.writes else None)

    try:
        compiled, seconds = chip.compile(
            call, *arguments.values(), donate=(3,) if case.writes else ()
        )
    except jax.errors.JaxRuntimeError as error:
        return {**row, "fault": " ".join(str(error).split())[:500]}
    found = look_at(compiled, arguments["kv"].data[0], writes=case.writes)
    return {**row, "compile_s": seconds, **found}


def compile_control(chip: Chip) -> dict:
    """A kernel over a pool 192 elements wide, which XLA must copy: caught, or this is the fault."""

    def body(_, pool, sem):
        copy = compat.make_async_copy(pool.at[0], pool.at[1], sem)
        copy.start()
        copy.wait()

    def call(pool):
        hbm = compat.BlockSpec(memory_space=compat.ANY)
        return compat.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
            in_specs=[hbm],
            out_specs=hbm,
            scratch_shapes=[compat.DmaSemaphore],
            input_output_aliases={0: 0},
        )(pool)

    pool = chip.array((MIN_POOL_BYTES // (16 * 192 * 2) + 1, 16, 192), "bfloat16")
    compiled, seconds = chip.compile(call, pool, donate=(0,))
    row = look_at(compiled, pool)
    found = "copies as large as the pool" in row["fault"]
    return {**row, "compile_s": seconds, "fault": "" if found else "its copies were not seen"}


def chosen(names: str, known: dict) -> dict:
    """The named entries, every one for "all", none for ""."""
    wanted = known if names == "all" else [name for name in names.split(",") if name]
    return {name: known[name] for name in wanted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", required=True)
    parser.add_argument("--heads", default=DEFAULT_HEADS)
    parser.add_argument("--steps", default=DEFAULT_STEPS)
    parser.add_argument("--kv_dtypes", default="bfloat16")
    parser.add_argument("--variants", default="all")
    flags = parser.parse_args()
    cases = {
        f"{heads_name} {step_name} {kv_dtype}": Attention(
            heads=(heads.num_heads, heads.num_kv_heads, heads.head_dim),
            step=step,
            kv_dtype=kv_dtype,
            dtype="float32" if kv_dtype == "float32" else "bfloat16",
        )
        for heads_name, heads in chosen(flags.heads, arg_specs.HEADS).items()
        for step_name, step in chosen(flags.steps, STEPS).items()
        for kv_dtype in flags.kv_dtypes.split(",")
    } | chosen(flags.variants, VARIANTS)
    chip = Chip(flags.topology)
    print(json.dumps({"name": "control: 192 wide", **compile_control(chip)}), flush=True)
    for name, case in cases.items():
        print(json.dumps({"name": name, **compile_attention(chip, case)}), flush=True)


if __name__ == "__main__":
    main()
