"""The flags that commands share, each defined into the `FlagValues` of the command that wants it.

Used by `run` and `bench`. No flag is global: two commands never clash, and --help shows a command its
own flags only. Defaults come from the dataclasses that the flags fill, so a number is written down
once.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from jaxserve.cli.arguments import UsageError
from jaxserve.cli.flag_types import (
    define_auto_integer,
    define_float,
    define_integer,
)
from jaxserve.cli.parallel_flags import PARALLEL_OPTIONS
from jaxserve.cli.scheduling_flags import define_scheduling
from jaxserve.cli.standard_streams import say
from jaxserve.config import DTYPES, KV_CACHE_DTYPES, CacheConfig, EngineConfig
from jaxserve.plan.capacity import CPU_POOL_LIMIT_BYTES, GIB
from pallas_kernels import dispatch

COMPILATION_CACHE_DIR = "~/.cache/jaxserve/xla"

_ENGINE_GROUP = "engine"
_GENERAL_GROUP = "general"
_ENGINE_OPTIONS = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "page_size",
    "num_pages",
    "kv_cache_gib",
    "memory_utilization",
    "kv_cache_dtype",
    "enable_prefix_caching",
    "eviction",
    "host_kv_gib",
    "admission",
    "max_num_partial_prefills",
    "long_prefill_token_threshold",
    "target_itl_s",
    "preemption_mode",
    "async_scheduling",
    "num_decode_steps",
    "token_buckets",
    "row_buckets",
    "attention_backend",
    "attention_interpret",
    "check_batches",
    "seed",
    "scheduling",
    "tensor_parallel_size",
)


def define_general(flag_values: flags.FlagValues) -> None:
    """--help, --helpfull, --flagfile, --verbosity."""
    group = {"flag_values": flag_values, "module_name": _GENERAL_GROUP}
    flags.DEFINE_boolean("help", False, "Print this help and exit (also -h).", **group)
    flags.DEFINE_boolean("helpfull", False, "The same as --help.", **group)
    flags.DEFINE_string(
        "flagfile", None, "Read arguments from this file, one a line; # begins a comment.", **group
    )
    define_integer(
        "verbosity",
        0,
        "-1: warnings only; 0: what was chosen at start and the summary; 1: debug, with tracebacks.",
        **group,
    )


def define_engine(flag_values: flags.FlagValues) -> None:
    """--model and the fields of `EngineConfig`, but not --scheduling: each command offers its own."""
    default = EngineConfig()
    group = {"flag_values": flag_values, "module_name": _ENGINE_GROUP}
    define_model(flag_values, _ENGINE_GROUP)
    flags.DEFINE_enum(
        "dtype",
        default.dtype,
        DTYPES,
        "Of weights and activations; auto = float32 on CPU, else bfloat16.",
        **group,
    )
    define_auto_integer(
        "max_model_len",
        "Most tokens of a sequence, prompt and output; auto = the model's limit.",
        **group,
    )
    define_integer(
        "max_num_seqs", default.scheduler.max_num_seqs, "Most sequences in one step.", **group
    )
    define_integer(
        "max_num_batched_tokens",
        default.scheduler.max_num_batched_tokens,
        "Token budget of one step, decode tokens and prefill chunks together.",
        **group,
    )
    define_integer(
        "tensor_parallel_size",
        default.parallel.tensor_parallel_size,
        "Devices that share the model: heads, MLP, vocabulary and KV pages are cut over them.",
        lower_bound=1,
        **group,
    )
    _define_page_pool(default.cache, group)
    _define_attention(default, group)
    define_scheduling(flag_values)
    define_integer(
        "seed",
        default.seed,
        "Draws of a line (of a server: a request) without a seed follow from this and its index.",
        **group,
    )
    define_compilation_cache(flag_values, _ENGINE_GROUP)


def define_model(flag_values: flags.FlagValues, group: str) -> None:
    """--model."""
    flags.DEFINE_string(
        "model",
        None,
        "A checkpoint directory, a .gguf file, or a name `jaxserve fetch` knows.",
        flag_values=flag_values,
        module_name=group,
    )


def define_compilation_cache(flag_values: flags.FlagValues, group: str) -> None:
    """--compilation_cache_dir."""
    flags.DEFINE_string(
        "compilation_cache_dir",
        COMPILATION_CACHE_DIR,
        "Where compiled programs are kept between runs; empty = nowhere.",
        flag_values=flag_values,
        module_name=group,
    )


def _define_attention(default: EngineConfig, group: Mapping[str, Any]) -> None:
    shipped = _shipped_backends()
    flags.DEFINE_string(
        "attention_backend",
        default.attention_backend,
        f"{', '.join(shipped[:-1])} or {shipped[-1]}; auto chooses by the platform.",
        **group,
    )
    flags.DEFINE_boolean(
        "attention_interpret",
        default.attention_interpret,
        "Run that backend's kernel in Pallas' interpreter, on this CPU and slowly: for debugging.",
        **group,
    )
    flags.DEFINE_boolean(
        "check_batches",
        default.check_batches,
        "Check page ids, lengths and counts of every step's batch before it runs: for debugging.",
        **group,
    )


def _define_page_pool(default: CacheConfig, group: Mapping[str, Any]) -> None:
    define_auto_integer(
        "page_size", "Tokens a page; auto = the attention backend's choice.", **group
    )
    define_auto_integer(
        "num_pages",
        "Pages in the pool, the null page included, so one more than can hold tokens; beats --kv_cache_gib.",
        **group,
    )
    define_float(
        "kv_cache_gib", None, "Size of the page pool, GiB; beats --memory_utilization.", **group
    )
    define_float(
        "memory_utilization",
        default.memory_utilization,
        "Share of the accelerator's memory for weights, programs and pages. On CPU the pool that this "
        f"makes is at most {CPU_POOL_LIMIT_BYTES // GIB} GiB; --kv_cache_gib and --num_pages may go beyond.",
        **group,
    )
    flags.DEFINE_enum(
        "kv_cache_dtype",
        default.kv_cache_dtype,
        list(KV_CACHE_DTYPES),
        "Of the pages; auto = the model's. int8 and fp8_e4m3 hold up to four times the tokens; their "
        "scales come from the checkpoint (fp8_e4m3) or are calibrated at start.",
        **group,
    )


def _shipped_backends() -> list[str]:
    return [one.name for one in dispatch.BACKENDS.values() if one.module is not None]


def engine_options(flag_values: flags.FlagValues) -> dict[str, object]:
    """The engine flags as options of `LLM`; `check_engine_options` checks them."""
    given: dict[str, Any] = flag_values.flag_values_dict()
    names = [*_ENGINE_OPTIONS, *(name for name in PARALLEL_OPTIONS if name in given)]
    options: dict[str, object] = {name: given[name] for name in names}
    cache_dir = given["compilation_cache_dir"]
    options["compilation_cache_dir"] = str(Path(cache_dir).expanduser()) if cache_dir else None
    return options


def check_engine_options(options: Mapping[str, object]) -> None:
    """Refuses what no model and no device could be served with, before anything slow is imported.

    Raises:
        ConfigError: a value outside its range.
        UsageError: no backend of that name, or one that does not ship.
    """
    backend = EngineConfig.from_options(options).attention_backend
    if backend != "auto":
        try:
            dispatch.layout_of(backend)
        except ValueError as error:
            raise UsageError(str(error)) from None


def help_text(usage: str, flag_values: flags.FlagValues) -> str:
    """What --help prints: the command's usage and its own flags by group."""
    groups = flag_values.flags_by_module_dict()
    return usage + "\n" + "\n".join(flag_values.module_help(group) for group in groups)


def wants_help(flag_values: flags.FlagValues) -> bool:
    """Whether --help or --helpfull was given."""
    return bool(flag_values["help"].value or flag_values["helpfull"].value)


class _StderrHandler(logging.Handler):
    """Prints to whatever sys.stderr is at that moment: a progress bar may have put itself in front of it."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def configure_logging(verbosity: int) -> None:
    """Sends the project's log to stderr: warnings and worse below 0, information at 0, everything above."""
    logger = logging.getLogger("jaxserve")
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(
        logging.WARNING if verbosity < 0 else logging.INFO if verbosity == 0 else logging.DEBUG
    )
