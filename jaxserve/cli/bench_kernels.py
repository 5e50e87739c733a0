"""`jaxserve bench kernels`: attention backends against each other, and against what the machine can do.

Called by `bench.py`. Which backends there are is `dispatch`'s word, so a new one is measured as soon as
it serves. Invariant: everything in one result was measured in one run, in turns.
"""

import logging
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from absl import flags

from jaxserve import __version__
from jaxserve.cli.arguments import UsageError
from jaxserve.cli.bench_result import check_output, write_result
from jaxserve.cli.command_line import read_command_line
from jaxserve.cli.flag_types import define_auto_integer, define_integer
from jaxserve.cli.flags import configure_logging, define_general
from jaxserve.cli.stop_signals import StopSignals
from jaxserve.config import DTYPES

USAGE = """\
usage: jaxserve bench kernels [flags]

Times attention alone, all layers of a model in one program, for each of --steps with each of --backends,
in turns, and prints one JSON object: ceilings (bytes and operations a second that this machine reaches
when it does nothing else), and for each step the least that it can take by them (least_ms) and for each
backend median_ms, min_ms, max_ms, compile_s, of_ceiling (least_ms / median_ms) and ratio (to the first
backend's median). Compare only inside one run. --roofline measures the ceilings alone.
exit code: 0 measured, 2 could not be measured, 130 or 143 stopped by SIGINT or SIGTERM
"""

HEAD_NAMES = ("smollm2-135m", "smollm2-360m", "llama-3.2-1b", "llama-3.1-8b", "tiny")
STEP_NAMES = (
    "decode-b1-c512",
    "decode-b16-c256",
    "decode-b32-c256",
    "decode-b16-c1024",
    "chunk-512-c512",
    "chunk-512-c2048",
    "chunk-8x64",
)
LARGE_STEP_NAMES = (
    "decode-b1-c8192",
    "decode-b64-c4096",
    "decode-b256-c1024",
    "chunk-2048-c2048",
    "chunk-2048-c16384",
    "chunk-32x64",
)
logger = logging.getLogger("jaxserve.cli")


def kernels_flags() -> flags.FlagValues:
    """The flags of `bench kernels`."""
    values = flags.FlagValues()
    group = {"flag_values": values, "module_name": "measurement"}
    flags.DEFINE_boolean("roofline", False, "Measure what the machine can do, no kernel.", **group)
    flags.DEFINE_list(
        "backends", [], "With commas; none = all that auto may choose on this platform.", **group
    )
    flags.DEFINE_string(
        "heads", HEAD_NAMES[0], f"Whose attention heads: {', '.join(HEAD_NAMES)}.", **group
    )
    flags.DEFINE_list(
        "steps",
        [],
        f"With commas: {', '.join(STEP_NAMES)}; none = all of these. For an accelerator also "
        f"{', '.join(LARGE_STEP_NAMES)}. bB-cC: B rows of one new token and a context of C; "
        "T-cC: one row of T new tokens; RxT: R rows of T.",
        **group,
    )
    define_auto_integer("layers", "Layers in the program; auto = the model's.", **group)
    define_auto_integer("page_size", "Tokens a page; auto = the first backend's own.", **group)
    flags.DEFINE_enum(
        "dtype", "auto", DTYPES, "auto = float32 on CPU, elsewhere bfloat16.", **group
    )
    define_integer("repetitions", 7, "How often to run each step.", lower_bound=1, **group)
    flags.DEFINE_string("output", None, "Write the JSON object to this file as well.", **group)
    define_general(values)
    return values


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        0.

    Raises:
        JaxserveError: it could not be measured.
    """
    given = read_command_line(argv, kernels_flags(), USAGE)
    if given is None:
        return 0
    if given["layers"] is not None and given["layers"] < 1:
        raise UsageError(f"--layers={given['layers']}: must be at least 1")
    check_output(given["output"])
    configure_logging(given["verbosity"])
    with StopSignals("before the measurement was done") as stop:
        result = measure(given)
        stop.defer()  # what follows is short, and no file is left half-written
        write_result(result, given["output"])
    return 0


def measure(given: Mapping[str, Any]) -> dict[str, Any]:
    """The result.

    Args:
        given: the flags.

    Raises:
        UsageError: heads or a step that is not known.
        ConfigError: a backend or a page size that cannot be served here.
    """
    from jaxserve.device.attention_timing import least_work, plan_arms, time_attention
    from jaxserve.device.ceilings import measure_ceilings
    from pallas_kernels.ragged_paged_attention.arg_specs import HEADS, LARGE_STEPS, STEPS

    all_steps = LARGE_STEPS | STEPS
    names = given["steps"] or list(STEPS)
    _check_known("heads", [given["heads"]], HEADS)
    _check_known("steps", names, all_steps)
    heads = HEADS[given["heads"]]
    plan = plan_arms(
        given["backends"], dtype=given["dtype"], page_size=given["page_size"], heads=heads
    )
    logger.info("what the machine can do:")
    ceilings = measure_ceilings(dtype=plan.dtype)
    result: dict[str, Any] = {
        "jaxserve_version": __version__,
        "jax_version": version("jax"),
        "ceilings": vars(ceilings) | {"dtype": plan.dtype},
    }
    if given["roofline"]:
        return result
    layers = given["layers"] or heads.num_layers
    result |= {"heads": given["heads"], "num_layers": layers, "page_size": plan.page_size}
    result["steps"] = steps = {}
    for number, name in enumerate(names, 1):
        logger.info("step %d of %d, %s:", number, len(names), name)
        num_bytes, num_flops = least_work(plan, all_steps[name], heads, num_layers=layers)
        times = time_attention(
            plan, all_steps[name], heads, num_layers=layers, repetitions=given["repetitions"]
        )
        steps[name] = step_figures(times, ceilings.least_s(num_bytes, num_flops))
        steps[name] |= {"bytes": num_bytes, "flops": num_flops}
        for backend, figures in steps[name]["backends"].items():
            logger.info("  %s: %.3f ms", backend, figures["median_ms"])
    return result


def step_figures(times: Mapping[str, Any], least_s: float) -> dict[str, Any]:
    """The figures of one step.

    Args:
        times: `ArmTimes` by backend; the first is what the others are compared with.
        least_s: what the step takes at the least.
    """
    medians = {name: statistics.median(one.step_s) for name, one in times.items()}
    first = next(iter(medians.values()))
    backends = {
        name: {
            "median_ms": medians[name] * 1e3,
            "min_ms": min(one.step_s) * 1e3,
            "max_ms": max(one.step_s) * 1e3,
            "compile_s": one.compile_s,
            "of_ceiling": least_s / medians[name],
            "ratio": medians[name] / first,
        }
        for name, one in times.items()
    }
    return {"least_ms": least_s * 1e3, "backends": backends}


def _check_known(flag: str, names: Sequence[str], known: Mapping[str, Any]) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"--{flag}={name}: no {name!r}; known: {', '.join(known)}")
