"""Compiles kernels and full steps for an H200 that is not there; started by scripts/gpu_aot.

Prints one JSON object a line. A row's "fault" is "" where all is well.
"""

import argparse
import json
from pathlib import Path

import jax
from jax.experimental import topologies

from jaxserve.device.aot_target import REFUSALS, Target, look_at, refusal
from scripts.aot import attention_cases, controls_gpu, full_step, kernel_dumps
from scripts.aot.arguments import parse
from scripts.aot.attention_cases import Attention
from scripts.aot.kernel_dumps import Kernel, KernelDumps
from scripts.aot.page_copy_cases import PageCopy, page_copies

DESCRIPTION = Path(__file__).with_name("h200.txtpb")
MULTIPROCESSORS = 132
HBM_GIB = 141
# Kernels of which two blocks share a multiprocessor, where pages are bf16 and narrow, and groups small.
DECODE = ("paged_decode",)


def make_target(num_devices: int) -> Target:
    """H200s of one host."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology=f"1x1x{num_devices}",
        target_config=DESCRIPTION.read_text(encoding="utf-8"),
    )
    return Target(topology.devices, "cuda", MULTIPROCESSORS)


def resident(case: Attention) -> tuple[str, ...]:
    """Kernels of a call of which two blocks must fit on a multiprocessor.

    Wider heads and larger groups need more registers and shared memory than half of it has, and 8-bit
    pages are widened in shared memory.
    """
    num_heads, kv_heads, head_dim = case.heads
    small = head_dim <= 128 and num_heads // kv_heads <= 8
    return DECODE if small and case.kv_dtype == "bfloat16" else ()


def figures(kernels: dict[str, Kernel]) -> dict:
    """The values of a row: one entry for each kernel, parted by blanks, in the order of "kernels".

    None where a program has no kernel.
    """
    if not kernels:
        return {}
    values = kernels.values()
    return {
        "kernels": " ".join(kernels),
        "registers": " ".join(str(kernel.registers) for kernel in values),
        "spill_bytes": " ".join(str(kernel.spill_bytes) for kernel in values),
        "smem_kib": " ".join(f"{kernel.smem_bytes / 2**10:.1f}" for kernel in values),
        "target": " ".join(sorted({kernel.target for kernel in values})),
    }


def compile_program(target, dumps, call, arguments, *, donate, pools, limited=()) -> dict:
    """One row of the report.

    Args:
        target, dumps: where to compile, and what reads its kernels.
        call: a function of `arguments`, placed abstract arrays.
        donate: argument numbers that it must update in place.
        pools: placed arrays that it must not copy.
        limited: names of kernels of which two blocks must fit on a multiprocessor.
    """
    try:
        with dumps.asked() as folder:
            compiled, seconds = target.compile(call, *arguments, donate=donate)
            kernels = dumps.read(folder, compiled.as_text())
    except REFUSALS as error:
        return {"fault": refusal(error)}
    row = look_at(compiled, [arguments[i] for i in donate], pools)
    found = [row["fault"]] * bool(row["fault"]) + kernel_dumps.faults(kernels, resident=limited)
    return {**row, "compile_s": seconds, **figures(kernels), "fault": "; ".join(found)}


def compile_attention(target: Target, dumps: KernelDumps, case: Attention) -> dict:
    """One row of the report."""
    call, arguments = attention_cases.call_and_arguments(target, case, "gpu")
    row = compile_program(
        target,
        dumps,
        call,
        list(arguments.values()),
        donate=(3,) if case.writes else (),
        pools=arguments["kv"].data,
        limited=resident(case),
    )
    if not row["fault"] and "kernels" not in row:
        row["fault"] = "no kernel in the program"
    return row


def compile_copy(target: Target, dumps: KernelDumps, case: PageCopy) -> dict:
    """One row of the report."""
    arguments = target.place(case.arguments)
    return compile_program(
        target, dumps, case.function, arguments, donate=case.donate, pools=arguments[0].data
    )


def compile_step(target: Target, dumps: KernelDumps, name: str, depth: int) -> dict:
    """One row of the report: the engine's programs, and the kernels in them."""
    config = full_step.MODELS[name]
    case = Attention(heads=(config.num_heads, config.num_kv_heads, config.head_dim))
    kernels: dict[str, Kernel] = {}

    def look(compiled) -> None:
        kernels.update(dumps.read(folder, compiled.as_text()))

    with dumps.asked() as folder:
        row = full_step.compile_step(name, depth, "gpu", target, look=look)
    found = [row["fault"]] * bool(row["fault"])
    found += kernel_dumps.faults(kernels, resident=resident(case))
    return {**row, **figures(kernels), "fault": "; ".join(found)}


def compile_controls(target: Target, dumps: KernelDumps) -> dict[str, dict]:
    """Programs with a fault that must be caught; where it is not, that is the row's fault."""
    rows = {}
    for name, control in controls_gpu.CONTROLS.items():
        arguments = [target.array(shape, dtype) for shape, dtype in control.arguments]
        row = compile_program(
            target,
            dumps,
            control.function,
            arguments,
            donate=control.donate,
            pools=[arguments[i] for i in control.donate],
            limited=(control.function.__name__,),
        )
        missed = [text for text in control.caught if text not in row["fault"]]
        missed = f"not caught: {', '.join(missed)}; {row['fault']}" if missed else ""
        rows[f"control: {name}"] = {**row, "fault": missed}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", default=attention_cases.DEFAULT_HEADS)
    parser.add_argument("--steps", default=attention_cases.DEFAULT_STEPS)
    parser.add_argument("--kv_dtypes", default="bfloat16")
    parser.add_argument("--variants", default="all")
    parser.add_argument("--copies", default="all")
    parser.add_argument("--models", default="llama-3-8b")
    parser.add_argument("--layers", default="4")
    parser.add_argument("--devices", default="1,8")
    flags = parse(parser, "gpu")
    # Mosaic's own small programs and the host's arrays have no device but the CPU.
    assert jax.default_backend() == "cpu"
    target, dumps = make_target(1), KernelDumps()

    def report(name: str, row: dict) -> None:
        print(json.dumps({"name": name, **row}), flush=True)

    for name, row in compile_controls(target, dumps).items():
        report(name, row)
    cases = attention_cases.cases("gpu", flags.heads, flags.steps, flags.kv_dtypes, flags.variants)
    for name, case in cases.items():
        report(name, compile_attention(target, dumps, case))
    for name, case in attention_cases.chosen(flags.copies, page_copies("gpu")).items():
        report(name, compile_copy(target, dumps, case))
    for name in attention_cases.chosen(flags.models, full_step.MODELS):
        for num_devices in map(int, flags.devices.split(",")):
            shared = make_target(num_devices)
            depth = full_step.pick_depth(name, flags.layers, "gpu", shared, HBM_GIB * 10**9)
            row = compile_step(shared, dumps, name, depth)
            report(full_step.row_name(name, depth, shared), row)


if __name__ == "__main__":
    main()
