"""`jaxserve plan --aot`: the step compiled for the TPUs that were planned, on a machine without them.

Called by `plan.py`. The compiler runs in a process of its own (`device.aot_worker`), because libtpu wants its
settings in the environment and takes the process for itself. Invariant: jax is not imported here.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

from absl import flags

from jaxserve.cli.arguments import UsageError
from jaxserve.cli.flag_types import define_auto_integer
from jaxserve.cli.model_shapes import find_config
from jaxserve.errors import JaxserveError
from jaxserve.plan.planner import Plan

_GROUP = "compiling for absent TPUs"
# Chip -> (what an accelerator type is called, its cores a chip), and chips -> the topology of so many.
_ACCELERATORS = {"v5e": ("v5litepod", 1), "v5p": ("v5p", 2), "v6e": ("v6e", 1)}
_FLAT = {8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_TOPOLOGIES = {
    "v5e": _FLAT,
    "v6e": _FLAT,
    "v5p": {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"},
}
logger = logging.getLogger("jaxserve.cli")


class AotError(JaxserveError):
    """The step could not be compiled; says what the compiler said."""


def define_aot(values: flags.FlagValues) -> None:
    """--aot, --aot_layers, --libtpu."""
    group: dict[str, Any] = {"flag_values": values, "module_name": _GROUP}
    flags.DEFINE_boolean(
        "aot",
        False,
        f"Compile the largest step for {', '.join(_TOPOLOGIES)} and set the compiler's own figures beside "
        "the plan's. Needs libtpu, and minutes.",
        **group,
    )
    define_auto_integer(
        "aot_layers",
        "Compile so many layers and add the bytes of the others; auto = all of them.",
        **group,
    )
    flags.DEFINE_string(
        "libtpu", None, "The file libtpu.so; unset = that of the installed package libtpu.", **group
    )


def compile_plan(given: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """What the compiler says of a plan that fits.

    Args:
        given: the flags by name.
        plan: of `make_plan`.

    Returns:
        JSON values: topology, num_layers, compile_s, fault; hbm_bytes, resident_bytes and step_bytes of a
        chip by the compiler, and the same with "planned_" by the plan; difference, a share of the plan.

    Raises:
        UsageError: a chip that is no TPU, more chips than a topology has, no libtpu.
        AotError: the compiler's process ended without an answer.
    """
    chip, num_chips = given["chip"], given["num_chips"]
    size, topology = _topology(chip, num_chips)
    config, memory, limits = plan.config, plan.memory, plan.config.scheduler
    model = find_config(given["model"]).at_context(config.longest)
    layers = model.num_layers if given["aot_layers"] is None else given["aot_layers"]
    if not 1 <= layers <= model.num_layers:
        raise UsageError(f"--aot_layers={layers}: the model has {model.num_layers} layers")
    asked = {
        "topology": topology,
        "num_chips": num_chips,
        "config": dataclasses.asdict(model),
        "num_layers": layers,
        "backend": plan.backend,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": config.longest,
        "page_size": plan.page_size,
        "num_pages": memory.num_pages,
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype,
    }
    found = _run_worker(asked, _settings(chip, size, find_libtpu(given["libtpu"])))
    planned = {
        "resident_bytes": memory.resident_bytes,
        "step_bytes": memory.step_bytes,
        "hbm_bytes": memory.resident_bytes + memory.step_bytes,
    }
    hbm = found["hbm_bytes"]
    return {
        "topology": topology,
        **found,
        **{f"planned_{name}": value for name, value in planned.items()},
        "difference": None if hbm is None else hbm / planned["hbm_bytes"] - 1,
    }


def _topology(chip: str, num_chips: int) -> tuple[int, str]:
    """(chips, name) of the smallest topology that has so many."""
    sizes = _TOPOLOGIES.get(chip)
    if sizes is None:
        raise UsageError(f"--aot compiles for {', '.join(_TOPOLOGIES)}, got --chip={chip}")
    size = next((size for size in sizes if size >= num_chips), None)
    if size is None:
        raise UsageError(f"--num_chips={num_chips}: --aot compiles for at most {max(sizes)} {chip}")
    return size, f"{chip}:{sizes[size]}"


def find_libtpu(given: str | None) -> Path:
    """The library.

    Args:
        given: --libtpu.

    Raises:
        UsageError: there is none; says how to get the one that belongs to this jax.
    """
    if given is not None:
        if not Path(given).is_file():
            raise UsageError(f"--libtpu={given}: no such file")
        return Path(given).resolve()
    spec = importlib.util.find_spec("libtpu")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / "libtpu.so").is_file():
            return Path(folder) / "libtpu.so"
    wanted = [
        line.split(";")[0].replace(" ", "")
        for line in importlib.metadata.requires("jax") or ()
        if line.startswith("libtpu")
    ]
    name = wanted[0] if wanted else "libtpu"
    raise UsageError(
        f"--aot needs libtpu, which is not installed: `pip install --target=FOLDER '{name}'` and "
        "--libtpu=FOLDER/libtpu/libtpu.so leave this environment as it is"
    )


def _settings(chip: str, size: int, library: Path) -> dict[str, str]:
    """Environment variables of the compiler's process."""
    name, cores = _ACCELERATORS[chip]
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_LIBRARY_PATH": str(library),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else two processes abort on its lock file
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": f"{name}-{size * cores}",
    }


def _run_worker(asked: dict[str, Any], settings: dict[str, str]) -> dict[str, Any]:
    logger.info("compiling %d layers for %s", asked["num_layers"], asked["topology"])
    path = "\n".join(sys.path)
    start = "import runpy, sys; sys.path[:] = sys.argv.pop().split('\\n'); "
    start += "runpy.run_module('jaxserve.device.aot_worker', run_name='__main__', alter_sys=True)"
    # `env` adds to what this process was given, which the package itself never reads.
    command = ["env", *(f"{name}={value}" for name, value in settings.items())]
    done = subprocess.run(
        [*command, sys.executable, "-P", "-c", start, path],
        input=json.dumps(asked),
        text=True,
        capture_output=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        tail = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise AotError(f"--aot: the compiler's process ended with {done.returncode}: {tail[0]}")
    return json.loads(lines[-1])
