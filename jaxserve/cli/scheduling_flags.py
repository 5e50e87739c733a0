"""The flags of scheduling and of the prefix cache, and those that record what an engine does.

`flags.define_engine` calls `define_scheduling`; `run` and `bench` call `define_records`. Defaults come
from the dataclasses that the flags fill.
"""

from collections.abc import Mapping
from typing import Any

from absl import flags

from jaxserve.cli.flag_types import (
    define_auto_integer,
    define_float,
    define_integer,
    define_integers,
)
from jaxserve.config import ADMISSION, EVICTION, PREEMPTION_MODES, CacheConfig, SchedulerConfig

_SCHEDULING_GROUP = "scheduling and prefix cache"
_RECORDS_GROUP = "records of the run"


def define_scheduling(flag_values: flags.FlagValues) -> None:
    """Who runs next, and whose pages are kept; but not --scheduling: each command offers its own."""
    group = {"flag_values": flag_values, "module_name": _SCHEDULING_GROUP}
    _define_steps(SchedulerConfig(), group)
    _define_ladders(group)
    _define_cache(CacheConfig(), group)


def _define_steps(default: SchedulerConfig, group: Mapping[str, Any]) -> None:
    flags.DEFINE_enum(
        "admission",
        default.admission,
        ADMISSION,
        "Which waiting request comes first. fcfs: the oldest. priority: the smallest priority of its "
        "line. lpm: the longest cached prefix, for many prompts with few beginnings. short_first: the "
        "shortest, so that nobody waits behind a long prompt, which then takes longer itself.",
        **group,
    )
    define_auto_integer(
        "max_num_partial_prefills",
        "Most prompts in the middle of their chunks at once; auto = 2, and --max_num_seqs with "
        "--admission=short_first. More lets short prompts pass long ones.",
        **group,
    )
    define_auto_integer(
        "long_prefill_token_threshold",
        "Most tokens a step of a prompt that needs more than one whole step, while others wait; auto = "
        "three quarters of the budget. Less leaves more of each step to short prompts.",
        **group,
    )
    define_float(
        "target_itl_s",
        default.target_itl_s,
        "Shrink chunks while others decode, until a step takes no longer than this: steadier streams, "
        "later first tokens. Unset = no target.",
        **group,
    )
    flags.DEFINE_enum(
        "preemption_mode",
        default.preemption_mode,
        PREEMPTION_MODES,
        "What happens to a request whose pages an older one needs. recompute: computed again later. "
        "swap: to host RAM and back (--host_kv_gib). auto: what is measured to cost less time.",
        **group,
    )
    flags.DEFINE_boolean(
        "async_scheduling",
        default.async_scheduling,
        "Plan and send each step while the one before it is still computed. Off only to compare: "
        "outputs are the same.",
        **group,
    )
    define_integer(
        "num_decode_steps",
        default.num_decode_steps,
        "When every request decodes and none waits, compute so many tokens of each before the host "
        "looks at them. More hides a slow host, and makes streams come in bursts.",
        lower_bound=1,
        **group,
    )


def _define_ladders(group: Mapping[str, Any]) -> None:
    define_integers(
        "token_buckets",
        "The numbers of tokens that a step may be padded to, ascending, the last "
        "--max_num_batched_tokens; auto = powers of two. `jaxserve buckets` proposes some.",
        **group,
    )
    define_integers(
        "row_buckets",
        "The same for the rows of a step that sample; the last is --max_num_seqs.",
        **group,
    )


def _define_cache(default: CacheConfig, group: Mapping[str, Any]) -> None:
    flags.DEFINE_boolean(
        "enable_prefix_caching",
        default.enable_prefix_caching,
        "Keep computed pages for requests that begin with the same tokens. Off only to compare.",
        **group,
    )
    flags.DEFINE_enum(
        "eviction",
        default.eviction,
        EVICTION,
        "Which cached pages go first when pages are needed: least recently used, least often used, "
        "oldest, or of the largest priority.",
        **group,
    )
    define_float(
        "host_kv_gib",
        default.host_kv_gib,
        "Host RAM to swap preempted requests to, GiB; 0 = none. For long contexts, where computing "
        "again takes longer than moving.",
        **group,
    )


def define_records(flag_values: flags.FlagValues, *, can_resume: bool = False) -> None:
    """--stats_file, --stats_interval_s, --schedule_log.

    Args:
        flag_values: where they go.
        can_resume: whether the command has --resume, with which it keeps the files that are there.
    """
    group = {"flag_values": flag_values, "module_name": _RECORDS_GROUP}
    older = "A file that is there is replaced"
    if can_resume:
        older += " (unless --resume is given: this part then goes to FILE.2, FILE.3 and so on)"
    flags.DEFINE_string(
        "stats_file",
        None,
        f"Write the engine's figures to this file, JSON lines. {older}.",
        **group,
    )
    define_float(
        "stats_interval_s",
        1.0,
        "Seconds between two lines of --stats_file; 0 = a line a step. The end always has a line.",
        **group,
    )
    flags.DEFINE_string(
        "schedule_log",
        None,
        f"Write every step to this file, JSON lines, for `jaxserve replay`. {older}.",
        **group,
    )
