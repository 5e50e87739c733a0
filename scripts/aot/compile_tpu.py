"""Compiles kernels and full steps for one TPU that is not there; started by scripts/tpu_aot.

Prints one JSON object a line. A row's "fault" is "" where all is well.
"""

import argparse
import json

import jax
from jax.experimental import topologies

from jaxserve.device.aot_target import REFUSALS, Target, look_at, refusal
from pallas_kernels import compat
from pallas_kernels.ragged_paged_attention import tpu
from pallas_kernels.tpu_smem import smem_bytes
from scripts.aot import attention_cases, full_step
from scripts.aot.arguments import parse
from scripts.aot.attention_cases import MIN_POOL_BYTES, Attention
from scripts.aot.page_copy_cases import PageCopy, page_copies


def needs(q, kv, *, num_rows: int, num_entries: int, case: Attention) -> dict:
    """What the kernel says of its own memory on one chip; arguments as `tpu.make_plan`."""
    options = {"window": None, "soft_cap": None, "return_lse": False} | case.options
    plan = tpu.make_plan(
        q,
        kv,
        num_rows=num_rows,
        num_entries=num_entries,
        has_sinks=case.sinks,
        writes=case.writes,
        interpreted=False,
        **options,
    )
    smem = smem_bytes(num_rows, plan.pages_per_row, plan.num_kv_heads)
    return {"vmem_mib": tpu.vmem_bytes(plan) / 2**20, "smem_kib": smem / 2**10}


def compile_attention(chip: Target, case: Attention) -> dict:
    """One row of the report."""
    call, arguments = attention_cases.call_and_arguments(chip, case, "tpu")
    kv = arguments["kv"]
    row = needs(
        arguments["q"],
        kv,
        num_rows=case.step.num_rows,
        num_entries=arguments["page_table"].size,
        case=case,
    )
    try:
        compiled, seconds = chip.compile(
            call, *arguments.values(), donate=(3,) if case.writes else ()
        )
    except REFUSALS as error:
        return {**row, "fault": refusal(error)}
    found = look_at(compiled, kv if case.writes else (), kv.data)
    return {**row, "compile_s": seconds, **found}


def compile_copy(chip: Target, case: PageCopy) -> dict:
    """One row of the report."""
    arguments = chip.place(case.arguments)
    try:
        compiled, seconds = chip.compile(case.function, *arguments, donate=case.donate)
    except REFUSALS as error:
        return {"fault": refusal(error)}
    found = look_at(compiled, [arguments[i] for i in case.donate], arguments[0].data)
    return {"compile_s": seconds, **found}


def compile_step(chips: Target, name: str, depth: int) -> dict:
    """One row of the report: the engine's programs, and what the kernel in them says of its memory."""
    config = full_step.MODELS[name]
    shapes = full_step.step_shapes(config, "tpu", chips)
    own = Attention(
        heads=(
            config.num_heads // chips.num_devices,
            config.num_kv_heads // chips.num_devices,
            config.head_dim,
        )
    )
    q = jax.ShapeDtypeStruct((shapes.buckets.tokens[-1], own.heads[0], own.heads[2]), shapes.dtype)
    kv = attention_cases.KVPages.abstract("tpu", 2, shapes.page_size, *own.heads[1:], shapes.dtype)
    rows = shapes.buckets.max_num_seqs
    row = needs(q, kv, num_rows=rows, num_entries=rows * shapes.max_pages, case=own)
    return row | full_step.compile_step(name, depth, "tpu", chips)


def compile_control(chip: Target) -> dict:
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
    row = look_at(compiled, pool, [pool])
    found = "copies as large as the pool" in row["fault"]
    return {**row, "compile_s": seconds, "fault": "" if found else "its copies were not seen"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", required=True)
    parser.add_argument("--hbm_gib", type=float, required=True)
    parser.add_argument("--heads", default=attention_cases.DEFAULT_HEADS)
    parser.add_argument("--steps", default=attention_cases.DEFAULT_STEPS)
    parser.add_argument("--kv_dtypes", default="bfloat16")
    parser.add_argument("--variants", default="all")
    parser.add_argument("--copies", default="all")
    parser.add_argument("--models", default="all")
    parser.add_argument("--layers", default="2")
    parser.add_argument("--devices", default="1,8")
    flags = parse(parser, "tpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=flags.topology).devices
    cores = getattr(devices[0], "num_cores", 1)
    chip = Target(devices[:1], "tpu", cores)

    def report(name: str, row: dict) -> None:
        print(json.dumps({"name": name, **row}), flush=True)

    report("control: 192 wide", compile_control(chip))
    cases = attention_cases.cases("tpu", flags.heads, flags.steps, flags.kv_dtypes, flags.variants)
    for name, case in cases.items():
        report(name, compile_attention(chip, case))
    for name, case in attention_cases.chosen(flags.copies, page_copies("tpu")).items():
        report(name, compile_copy(chip, case))
    for name in attention_cases.chosen(flags.models, full_step.MODELS):
        for num_devices in map(int, flags.devices.split(",")):
            target = Target(devices[:num_devices], "tpu", cores)
            hbm = int(flags.hbm_gib * 2**30)
            depth = full_step.pick_depth(name, flags.layers, "tpu", target, hbm)
            report(full_step.row_name(name, depth, target), compile_step(target, name, depth))


if __name__ == "__main__":
    main()
