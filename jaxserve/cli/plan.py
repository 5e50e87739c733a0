"""`jaxserve plan`: will a model fit some chips, how many sequences at once, how fast at best.

Run by `cli/main.py`, which turns the errors into one line and exit code 2. Nothing here imports jax: there is
no device. The numbers come from `plan/planner.py`; `--aot` and `--sweep` are modules of their own.
"""

import json
import logging
from collections.abc import Sequence
from typing import Any

from absl import flags

from jaxserve.cli.arguments import UsageError
from jaxserve.cli.command_line import read_command_line
from jaxserve.cli.flag_types import (
    IntegersParser,
    define_auto_integer,
    define_float,
    define_integer,
)
from jaxserve.cli.flags import configure_logging, define_general
from jaxserve.cli.model_shapes import MODEL_HELP, find_model
from jaxserve.cli.plan_aot import compile_plan, define_aot
from jaxserve.cli.plan_sweep import check_sweep, define_sweep, sweep
from jaxserve.cli.plan_text import plan_json, plan_text
from jaxserve.cli.standard_streams import write_stdout
from jaxserve.config import KV_CACHE_DTYPES, CacheConfig, SchedulerConfig
from jaxserve.plan.chips import CHIPS, chip_spec
from jaxserve.plan.planner import PlanConfig, fewest_chips, make_plan
from jaxserve.plan.work import PLANNED_DTYPES
from jaxserve.schedule.buckets import Buckets

USAGE = """\
usage: jaxserve plan --model=NAME|DIR --chip=NAME [--num_chips=N] [--lengths=PROMPT,OUTPUT] [flags]

Says, without a device and without weights, whether a model fits: bytes of the weights and of a token's keys
and values, pages that are left, the most sequences of the given lengths at once, and how fast steps can be at
best on the chip's roofline. Prints a table with the formulas, or one JSON object with --json:
kv_bytes_per_token, weight_bytes, num_pages (the null page included), max_concurrency, decode_tokens_per_s,
prefill_tokens_per_s, ridge_batch and more.
exit code: 0 it fits, 1 it does not (the table says by how much, or why the compiler refuses it), 2 it could
not be planned, 130 interrupted
"""

_GROUP = "plan"
# A server's limits, not those of the engine's defaults, which are for a small machine.
_MAX_NUM_SEQS, _MAX_NUM_BATCHED_TOKENS = 256, 2048
EXIT_FITS, EXIT_DOES_NOT_FIT = 0, 1
logger = logging.getLogger("jaxserve.cli")


def plan_flags() -> flags.FlagValues:
    """The flags of the command."""
    values = flags.FlagValues()
    group: dict[str, Any] = {"flag_values": values, "module_name": _GROUP}
    flags.DEFINE_string("model", None, MODEL_HELP, **group)
    flags.DEFINE_enum("chip", None, list(CHIPS), "Whose memory and roofline.", **group)
    define_integer("num_chips", 1, "Chips that share every layer by heads.", **group)
    flags.DEFINE_enum("dtype", "bfloat16", PLANNED_DTYPES, "Of weights and activations.", **group)
    flags.DEFINE_enum(
        "kv_cache_dtype", "auto", list(KV_CACHE_DTYPES), "Of the pages; auto = --dtype.", **group
    )
    define_auto_integer(
        "page_size", "Tokens a page; auto = the choice of the engine on that chip.", **group
    )
    define_auto_integer(
        "max_model_len", "Most tokens of a sequence; auto = the model's limit.", **group
    )
    define_integer("max_num_seqs", _MAX_NUM_SEQS, "Most sequences in one step.", **group)
    define_integer(
        "max_num_batched_tokens", _MAX_NUM_BATCHED_TOKENS, "Token budget of one step.", **group
    )
    define_float(
        "memory_utilization",
        CacheConfig().memory_utilization,
        "Share of a chip's memory for weights, programs and pages.",
        **group,
    )
    flags.DEFINE(
        IntegersParser(),
        "lengths",
        [1024, 256],
        "Tokens of the prompt and of the output of the sequences that are counted.",
        serializer=flags.ListSerializer(","),
        **group,
    )
    flags.DEFINE_boolean("json", False, "Print one JSON object, not a table.", **group)
    define_aot(values)
    define_sweep(values)
    define_general(values)
    return values


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: the arguments behind `plan`.

    Returns:
        0 where the model fits, 1 where it does not, or where the compiler of --aot finds a fault.

    Raises:
        UsageError: a flag is missing or at fault.
        ConfigError: a value outside its range, or chips that cannot share the model.
        TraceError: the trace of --sweep cannot be read.
    """
    given = read_command_line(argv, plan_flags(), USAGE, needed=("model", "chip"))
    if given is None:
        return EXIT_FITS
    configure_logging(given["verbosity"])
    check_sweep(given)
    config = plan_config(given)
    plan = make_plan(config)
    buckets = Buckets.make(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )
    record = plan_json(plan, buckets)
    record |= {"model": given["model"], "chip": given["chip"]}
    record["fewest_chips"] = config.num_chips if plan.fits else fewest_chips(config)
    if plan.fits and given["aot"]:
        record["aot"] = compile_plan(given, plan)
    if plan.fits and given["sweep"]:
        record["sweep"] = sweep(given, plan)
    text = json.dumps(record, indent=2, allow_nan=False) if given["json"] else plan_text(record)
    write_stdout(text + "\n")
    is_faulty = "aot" in record and record["aot"]["fault"]
    return EXIT_FITS if plan.fits and not is_faulty else EXIT_DOES_NOT_FIT


def plan_config(given: dict[str, Any]) -> PlanConfig:
    """The flags as a config.

    Raises:
        UsageError: no such model; lengths that are not two.
        ConfigError: a value outside its range.
    """
    lengths = given["lengths"]
    if len(lengths) != 2 or min(lengths) < 1:
        raise UsageError(
            f"--lengths={','.join(map(str, lengths))}: must be two numbers from 1 up, the tokens of the "
            "prompt and of the output"
        )
    return PlanConfig(
        model=find_model(given["model"]),
        chip=chip_spec(given["chip"]),
        num_chips=given["num_chips"],
        dtype=given["dtype"],
        cache=CacheConfig(
            page_size=given["page_size"],
            kv_cache_dtype=given["kv_cache_dtype"],
            memory_utilization=given["memory_utilization"],
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=given["max_num_seqs"],
            max_num_batched_tokens=given["max_num_batched_tokens"],
        ),
        max_model_len=given["max_model_len"],
        num_prompt_tokens=lengths[0],
        num_output_tokens=lengths[1],
    )
