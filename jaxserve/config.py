"""The one tree of settings: `EngineConfig` and its branches, frozen and checked when made.

Built by the faces (`LLM(**options)`, the CLI's flags) and read by `jaxserve.build`. What is found out at
run time (how many pages fit, which backend "auto" means) is returned by the part that finds it,
never written back here.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxserve.errors import ConfigError, shown
from jaxserve.field_names import checks_names, closest
from jaxserve.multihost.config import ProcessConfig

DTYPES = ("auto", "float32", "bfloat16")
# What `kv_cache_dtype` may be -> the element type that numpy and jax call it by; None = the model's.
KV_CACHE_DTYPES = {
    "auto": None,
    "float32": "float32",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "fp8_e4m3": "float8_e4m3fn",
}
SCHEDULING = ("continuous", "static")
ADMISSION = ("fcfs", "priority", "lpm", "short_first")
PREEMPTION_MODES = ("auto", "recompute", "swap")
EVICTION = ("lru", "lfu", "fifo", "priority")
MIN_PAGE_SIZE = 4
MAX_GIB = 2**20
MAX_NUM_BATCHED_TOKENS = 2**20
MAX_DEVICES = 4096


def _check_int(name: str, value: object, low: int, high: int = 2**31 - 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer in [{low}, {high}], got {shown(value)}")


def _check_optional_int(name: str, value: object, low: int) -> None:
    if value is not None:
        _check_int(name, value, low)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {shown(value)}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")


def _check_positive(
    name: str, value: object, high: float = math.inf, *, or_zero: bool = False
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared, not converted: an integer may be beyond every float, and NaN fails each comparison.
    is_positive = is_number and 0 < value < math.inf and value <= high  # type: ignore[operator]
    if not is_positive and not (or_zero and is_number and value == 0):
        limits = f"{'[' if or_zero else '('}0, {high}{')' if high == math.inf else ']'}"
        raise ConfigError(f"{name} must be a number in {limits}, got {shown(value)}")


def _ladder(name: str, value: object, limit_name: str, limit: int) -> tuple[int, ...]:
    """The rungs as a tuple, if they climb to the limit."""
    rungs = tuple(value) if isinstance(value, list | tuple) else ()
    are_counts = all(isinstance(rung, int) and not isinstance(rung, bool) for rung in rungs)
    if (
        not rungs
        or not are_counts
        or rungs[0] < 1
        or any(low >= high for low, high in itertools.pairwise(rungs))
        or rungs[-1] != limit
    ):
        raise ConfigError(
            f"{name} must be ascending integers from 1 up that end with {limit_name}, {limit}; "
            f"got {shown(value)}"
        )
    return rungs


@checks_names
@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV page pool. num_pages beats kv_cache_gib beats memory_utilization.

    Args:
        page_size: tokens a page; a power of two >= 4. None = the attention backend's own size.
        num_pages: pages in the pool, the null page included; at least 2.
        kv_cache_gib: size of the pool over all layers, and over all devices that share a model, GiB.
        memory_utilization: share of the accelerator's memory that weights, programs and pages may
            take together. On CPU the pool is bounded by what `max_num_seqs` full contexts need and
            by 2 GiB as well.
        kv_cache_dtype: element type of the pages, a key of KV_CACHE_DTYPES; "auto" = the model's.
            The 8-bit types hold keys and values divided by a scale per layer and kv head.
        enable_prefix_caching: keep the pages of finished and preempted sequences for requests that
            begin with the same tokens.
        eviction: which of the cached pages that nobody uses go first when pages are needed.
        host_kv_gib: size of the pool in host RAM that preempted sequences may be swapped to, over
            all layers, GiB; 0 = none.

    Raises:
        ConfigError: a value outside its range.
    """

    page_size: int | None = None
    num_pages: int | None = None
    kv_cache_gib: float | None = None
    memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    eviction: str = "lru"
    host_kv_gib: float = 0.0

    def __post_init__(self) -> None:
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, tuple(KV_CACHE_DTYPES))
        if self.page_size is not None:
            _check_int("page_size", self.page_size, MIN_PAGE_SIZE)
            if self.page_size & (self.page_size - 1):
                raise ConfigError(f"page_size must be a power of two, got {self.page_size}")
        _check_optional_int("num_pages", self.num_pages, 2)
        if self.kv_cache_gib is not None:
            _check_positive("kv_cache_gib", self.kv_cache_gib, MAX_GIB)
        _check_positive("memory_utilization", self.memory_utilization, 1.0)
        _check_bool("enable_prefix_caching", self.enable_prefix_caching)
        _check_choice("eviction", self.eviction, EVICTION)
        _check_positive("host_kv_gib", self.host_kv_gib, MAX_GIB, or_zero=True)


@checks_names
@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Who runs next, and how much of it.

    Args:
        max_num_seqs: most sequences in one step. Lowered to max_num_batched_tokens where that is
            smaller.
        max_num_batched_tokens: the token budget of one step, decode tokens and prefill chunks
            together.
        scheduling: "continuous" admits a request as soon as there is room; "static" (for
            comparison) admits a batch and lets it drain before the next.
        admission: who of the waiting comes first. "fcfs": the oldest. "priority": the smallest
            `Request.priority`, then the oldest; running sequences give way in that order too.
            "lpm": the longest cached prefix. "short_first": the fewest tokens to compute. The last
            two let nobody be overtaken for ever.
        max_num_partial_prefills: most prompts in the middle of their chunks at once. None = 2, and
            max_num_seqs with "short_first".
        long_prefill_token_threshold: most tokens a step of a prompt that needs more than one whole
            step, while others wait or are in the middle of theirs. None = three quarters of
            max_num_batched_tokens.
        target_itl_s: while sequences are decoding, chunks shrink until a step takes no longer than
            this many seconds, as far as measured. None = no target.
        preemption_mode: what happens to a running sequence whose pages an older one needs.
            "recompute" computes them again; "swap" moves them to host RAM (host_kv_gib) and back,
            and recomputes when there is no room; "auto" does what costs less time.
        async_scheduling: plan and send each step while the one before it is still computed, so that
            the device never waits for the host. Outputs are the same with and without it.
        num_decode_steps: when every running sequence decodes and nobody waits, compute so many
            tokens of each before the host looks at them. More hides a slow host; outputs come in
            bursts, and what a sequence computes behind its end is lost.
        token_buckets: the numbers of tokens that a step may be padded to, ascending, the last
            max_num_batched_tokens; each is a few programs to compile. None = powers of two.
            `jaxserve buckets` proposes some for a workload.
        row_buckets: the same for the rows of a step that are sampled; the last is max_num_seqs, or
            max_num_batched_tokens where that is smaller.

    Raises:
        ConfigError: a value outside its range.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    scheduling: str = "continuous"
    admission: str = "fcfs"
    max_num_partial_prefills: int | None = None
    long_prefill_token_threshold: int | None = None
    target_itl_s: float | None = None
    preemption_mode: str = "auto"
    async_scheduling: bool = True
    num_decode_steps: int = 1
    token_buckets: Sequence[int] | None = None
    row_buckets: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _check_int("max_num_seqs", self.max_num_seqs, 1, 4096)
        _check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, MAX_NUM_BATCHED_TOKENS)
        _check_choice("scheduling", self.scheduling, SCHEDULING)
        _check_choice("admission", self.admission, ADMISSION)
        _check_optional_int("max_num_partial_prefills", self.max_num_partial_prefills, 1)
        _check_optional_int("long_prefill_token_threshold", self.long_prefill_token_threshold, 1)
        if self.target_itl_s is not None:
            _check_positive("target_itl_s", self.target_itl_s)
        _check_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        _check_bool("async_scheduling", self.async_scheduling)
        _check_int("num_decode_steps", self.num_decode_steps, 1, 1024)
        limits = {
            "token_buckets": ("max_num_batched_tokens", self.max_num_batched_tokens),
            "row_buckets": ("max_num_seqs", min(self.max_num_seqs, self.max_num_batched_tokens)),
        }
        for name, (limit_name, limit) in limits.items():
            if getattr(self, name) is not None:  # a tuple, so that the settings stay frozen
                rungs = _ladder(name, getattr(self, name), limit_name, limit)
                object.__setattr__(self, name, rungs)


@checks_names
@dataclass(frozen=True, kw_only=True)
class AxisRules:
    """Which axis of a mesh each logical axis of the model is cut by; None keeps it whole on every
    device. Several names cut it by all of these axes together.

    Args:
        heads: query and KV heads, and with them the KV pages.
        ffn: the inner size of the MLP.
        vocab: rows of the embedding and columns of the head, and with them the logits.

    Raises:
        ConfigError: something else than a name, several different names, or None.
    """

    heads: str | tuple[str, ...] | None = "model"
    ffn: str | tuple[str, ...] | None = "model"
    vocab: str | tuple[str, ...] | None = "model"

    @classmethod
    def over(cls, axes: str | tuple[str, ...] | None) -> "AxisRules":
        """Everything cut by the same axes."""
        return cls(heads=axes, ffn=axes, vocab=axes)

    def __post_init__(self) -> None:
        for rule in dataclasses.fields(self):
            value = getattr(self, rule.name)
            names = self.names(rule.name)
            if not all(isinstance(name, str) and name for name in names) or (
                len(set(names)) < len(names) or value in ((), [])
            ):
                raise ConfigError(
                    f"axis_rules.{rule.name} must be the name of a mesh axis, several of them, or "
                    f"None, got {shown(value)}"
                )
            if isinstance(value, list):
                object.__setattr__(self, rule.name, names)

    def names(self, logical_axis: str) -> tuple[str, ...]:
        """The mesh axes that a logical axis is cut by; none where it stays whole."""
        value = getattr(self, logical_axis)
        if value is None:
            return ()
        return tuple(value) if isinstance(value, tuple | list) else (value,)

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Every mesh axis that is named, once."""
        every = (name for rule in dataclasses.fields(self) for name in self.names(rule.name))
        return tuple(dict.fromkeys(every))


@checks_names
@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How devices share the work.

    Args:
        tensor_parallel_size: devices that share each copy of the model, every one with its part of
            the heads, of the MLP and of the vocabulary. Where a mesh is passed to `build_engine` it
            says how many; then 1 or that number.
        data_parallel_size: copies of the model, each with KV pages and a scheduler of its own.
        axis_rules: which axes of the mesh cut what. Without a mesh all rules name one axis.

    Raises:
        ConfigError: a value outside its range.
    """

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    axis_rules: AxisRules = field(default_factory=AxisRules)

    def __post_init__(self) -> None:
        _check_int("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_DEVICES)
        _check_int("data_parallel_size", self.data_parallel_size, 1, MAX_DEVICES)
        if not isinstance(self.axis_rules, AxisRules):
            raise ConfigError(f"axis_rules must be AxisRules, got {shown(self.axis_rules)}")


@checks_names
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine can be told.

    Args:
        dtype: of weights and activations; "auto" = float32 on CPU, bfloat16 elsewhere.
        max_model_len: most tokens of a sequence, prompt and output together. None = the model's own
            limit.
        attention_backend: a name of `pallas_kernels.dispatch`, or "auto".
        attention_interpret: run the kernel of `attention_backend` in Pallas' interpreter, on the
            CPU and slowly: for tests and debugging.
        check_batches: debug mode: check the page ids, lengths and counts of every batch on the
            host before it is submitted.
        seed: where the draws of requests without a seed of their own come from.
        compilation_cache_dir: folder of jax's persistent compilation cache; None leaves jax's
            setting alone.
        cache: the page pool.
        scheduler: the step's limits.
        parallel: how devices share the work.
        processes: who else runs this engine.

    Raises:
        ConfigError: a value outside its range, or of the wrong type.
    """

    dtype: str = "auto"
    max_model_len: int | None = None
    attention_backend: str = "auto"
    attention_interpret: bool = False
    check_batches: bool = False
    seed: int = 0
    compilation_cache_dir: str | Path | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    processes: ProcessConfig = field(default_factory=ProcessConfig)

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, DTYPES)
        _check_optional_int("max_model_len", self.max_model_len, 1)
        if not isinstance(self.attention_backend, str):
            raise ConfigError(f"attention_backend must be a name, got {self.attention_backend!r}")
        _check_bool("attention_interpret", self.attention_interpret)
        _check_bool("check_batches", self.check_batches)
        _check_int("seed", self.seed, 0, 2**63 - 1)
        folder = self.compilation_cache_dir
        if folder is not None and not isinstance(folder, str | Path):
            raise ConfigError(f"compilation_cache_dir must be a folder, got {shown(folder)}")
        if self.scheduler.preemption_mode == "swap" and not self.cache.host_kv_gib:
            raise ConfigError(
                "preemption_mode 'swap' needs room in host RAM: set host_kv_gib, got 0"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> "EngineConfig":
        """The tree from flat names, each routed to the branch that owns it.

        Raises:
            ConfigError: a name that no branch has, or a value outside its range.
        """
        branches = {
            "cache": CacheConfig,
            "scheduler": SchedulerConfig,
            "parallel": ParallelConfig,
            "processes": ProcessConfig,
        }
        taken: set[str] = set()
        built = {}
        for name, branch in branches.items():
            own = {f.name for f in dataclasses.fields(branch)} & options.keys()
            taken |= own
            built[name] = branch(**{key: options[key] for key in own})
        own = {f.name for f in dataclasses.fields(cls)} - branches.keys()
        unknown = options.keys() - taken - own
        if unknown:
            known = sorted(own | {f.name for b in branches.values() for f in dataclasses.fields(b)})
            name = sorted(unknown)[0]
            near = closest(name, known)
            hint = f"did you mean {near!r}? " if near else ""
            raise ConfigError(f"unknown option {name!r}; {hint}known: {', '.join(known)}")
        return cls(**{key: options[key] for key in own & options.keys()}, **built)
