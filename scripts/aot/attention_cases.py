"""Which attention calls are compiled ahead of time: named shapes, and variants that reach what those leave.

Read by the workers. Invariant: a case is data; a kernel that learns something new gets a line here.
"""

import dataclasses
import functools
from typing import Any

from jaxserve.device.aot_target import Target
from pallas_kernels import dispatch
from pallas_kernels.page_bytes import page_bytes
from pallas_kernels.ragged_paged_attention import KVPages, arg_specs, ragged_paged_attention

# Above this a pool stays in HBM: XLA prefetches smaller arrays into VMEM whole, a copy of no concern.
MIN_POOL_BYTES = 256 * 2**20
PAGE_SIZES = {"tpu": 32, "gpu": 64}
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
_ONE_TOKEN = arg_specs.StepSpec(num_rows=1, num_tokens=1, context=512)
# What the named shapes do not reach: every head_dim, group, element type and option once or more.
VARIANTS = {
    "tpu": {
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
        "one token": Attention(heads=(9, 3, 64), step=_ONE_TOKEN),
    },
    "gpu": {
        "bf16 8/2/256 all options": Attention(heads=(8, 2, 256), sinks=True, options=EVERYTHING),
        "mha bf16 16/16/128": Attention(heads=(16, 16, 128), sinks=True),
        "mqa bf16 32/1/128": Attention(heads=(32, 1, 128)),
        "bf16 32/8/128 all options": Attention(heads=(32, 8, 128), sinks=True, options=EVERYTHING),
        "int8 32/8/128 all options": Attention(
            heads=(32, 8, 128), kv_dtype="int8", sinks=True, options=EVERYTHING
        ),
        "int8 9/3/64": Attention(heads=(9, 3, 64), kv_dtype="int8"),
        "int8 8/2/256": Attention(heads=(8, 2, 256), kv_dtype="int8"),
        "e4m3 32/8/128": Attention(heads=(32, 8, 128), kv_dtype="float8_e4m3fn"),
        "e4m3 9/3/64": Attention(heads=(9, 3, 64), kv_dtype="float8_e4m3fn"),
        "e4m3 8/2/256": Attention(heads=(8, 2, 256), kv_dtype="float8_e4m3fn"),
        "bf16 71/1/64": Attention(heads=(71, 1, 64)),
        "e5m2 32/8/128": Attention(heads=(32, 8, 128), kv_dtype="float8_e5m2"),
        "read only": Attention(heads=(32, 8, 64), writes=False, options={"return_lse": True}),
        "one token": Attention(heads=(9, 3, 64), step=_ONE_TOKEN),
    },
}


def chosen(names: str, known: dict) -> dict:
    """The named entries, every one for "all", none for ""; raises ValueError for a name that is none."""
    wanted = known if names == "all" else [name for name in names.split(",") if name]
    for name in wanted:
        if name not in known:
            raise ValueError(f"no {name!r}; known: {', '.join(known)}")
    return {name: known[name] for name in wanted}


def cases(backend: str, heads: str, steps: str, kv_dtypes: str, variants: str) -> dict:
    """Cases by name: heads x steps x element types, and variants; arguments are names as in `chosen`."""
    named = {
        f"{heads_name} {step_name} {kv_dtype}": Attention(
            heads=(spec.num_heads, spec.num_kv_heads, spec.head_dim),
            step=step,
            kv_dtype=kv_dtype,
            dtype="float32" if kv_dtype == "float32" else "bfloat16",
        )
        for heads_name, spec in chosen(heads, arg_specs.HEADS).items()
        for step_name, step in chosen(steps, STEPS).items()
        for kv_dtype in kv_dtypes.split(",")
    }
    return named | chosen(variants, VARIANTS[backend])


def call_and_arguments(target: Target, case: Attention, backend: str):
    """(a function of arrays alone, its abstract arguments by name, in order)."""
    num_heads, kv_heads, head_dim = case.heads
    rows, num_tokens = case.step.num_rows, case.step.num_rows * case.step.num_tokens
    page_size, layout = PAGE_SIZES[backend], dispatch.layout_of(backend)
    one_page = page_bytes(layout, page_size, kv_heads, head_dim, case.kv_dtype)
    num_pages = MIN_POOL_BYTES // one_page + 1
    kv = KVPages.abstract(layout, num_pages, page_size, kv_heads, head_dim, case.kv_dtype)
    array = target.array
    new = array((num_tokens, kv_heads, head_dim), case.dtype) if case.writes else None
    i32 = functools.partial(array, dtype="int32")
    scale = array((kv_heads,), "float32") if kv.dtype.itemsize == 1 else None
    arguments = {
        "q": array((num_tokens, num_heads, head_dim), case.dtype),
        "k_new": new,
        "v_new": new,
        "kv": target.place(kv),
        "kv_lens": i32((rows,)),
        "page_table": i32((rows * -(-case.step.context // page_size),)),
        "kv_starts": i32((rows,)),
        "cu_q_lens": i32((rows + 1,)),
        "ranges": i32((3,)),
        "k_scale": scale,
        "v_scale": scale,
        "sinks": array((num_heads,), "float32") if case.sinks else None,
    }

    def call(*arrays: Any):
        out, kv, lse = ragged_paged_attention(
            *arrays, sm_scale=head_dim**-0.5, backend=backend, **case.options
        )
        return out, lse, (kv if case.writes else None)

    return call, arguments
