"""What to simulate: `SimulationConfig`, and the scheduler that it describes.

Made by `jaxserve simulate` and the figures' script, read by the loop. The limits of a step and of the
cache are the engine's own `SchedulerConfig` and `CacheConfig`, so a flag means here what it means
there.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxserve.config import MAX_NUM_BATCHED_TOKENS, CacheConfig, SchedulerConfig
from jaxserve.errors import ConfigError, shown
from jaxserve.executor import StepCosts
from jaxserve.pages.kv_manager import KVManager
from jaxserve.plan.capacity import GIB
from jaxserve.plan.chips import ChipSpec
from jaxserve.plan.models import ModelSpec
from jaxserve.plan.roofline import Roofline
from jaxserve.plan.simulate.contiguous import contiguous_max, contiguous_pow2
from jaxserve.plan.traces import Trace
from jaxserve.plan.work import PLANNED_DTYPES
from jaxserve.schedule.build import build_scheduler
from jaxserve.schedule.scheduler import Scheduler

ARRIVALS = ("timed", "sequential")
CONTIGUOUS: dict[str, Callable[..., KVManager]] = {
    "contiguous_max": contiguous_max,
    "contiguous_pow2": contiguous_pow2,
}
ALLOCATORS = ("paged", *CONTIGUOUS)
DEFAULT_PAGE_SIZE = 16
MAX_PAGES = 2**27  # of the pool, and of host RAM: each costs some 50 bytes of our own
MAX_CLOCK_S = 2.0**30  # 34 years; the clock still tells a microsecond there


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """One arm of a simulation.

    Args:
        model: shapes.
        chip: what a chip can do.
        num_chips: tensor parallel over so many.
        dtype: of weights and activations: "bfloat16" or "float32".
        scheduler: limits and policies of a step.
        cache: page_size (None = 16), kv_cache_dtype, enable_prefix_caching, eviction and host_kv_gib;
            num_pages, None = as many as the chips' memory holds at memory_utilization.
        unlimited_pages: as many pages as the whole trace could ever fill; cache.num_pages is None.
        max_model_len: most tokens of a request; None = those of the trace's longest.
        allocator: "paged", or one of the contiguous ones, which share nothing.
        chunked_prefill: False = a prompt is computed whole in one step, whatever the token budget.
        arrivals: "timed": when the trace says. "sequential": the next request arrives when the one
            before it has ended, prompts are filled up to whole blocks and one token is generated, so
            nothing but prompts is ever cached: the published way of counting block hits.
        rate_scale: requests arrive so many times faster than in the trace.

    Raises:
        ConfigError: a value outside its range, or settings that exclude each other.
    """

    model: ModelSpec
    chip: ChipSpec
    num_chips: int = 1
    dtype: str = "bfloat16"
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    unlimited_pages: bool = False
    max_model_len: int | None = None
    allocator: str = "paged"
    chunked_prefill: bool = True
    arrivals: str = "timed"
    rate_scale: float = 1.0

    def __post_init__(self) -> None:
        choosable = {"allocator": ALLOCATORS, "arrivals": ARRIVALS, "dtype": PLANNED_DTYPES}
        for name, choices in choosable.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len must be at least 2, got {shown(self.max_model_len)}")
        if not 0 < self.rate_scale < float("inf"):
            raise ConfigError(f"rate_scale must be a number > 0, got {shown(self.rate_scale)}")
        if self.arrivals == "sequential" and self.rate_scale != 1:
            raise ConfigError("rate_scale needs timed arrivals: sequential ones have no rate")
        if self.unlimited_pages and self.cache.num_pages is not None:
            raise ConfigError("num_pages is either a number or unlimited, got both")
        if not self.chunked_prefill and self.scheduler.target_itl_s is not None:
            raise ConfigError("target_itl_s shrinks chunks: chunked_prefill must be True")
        if self.allocator != "paged":
            self._check_contiguous()

    def _check_contiguous(self) -> None:
        if self.cache.enable_prefix_caching:
            raise ConfigError(
                f"allocator {self.allocator!r} shares nothing: enable_prefix_caching must be False"
            )
        if self.cache.host_kv_gib:
            raise ConfigError(
                f"allocator {self.allocator!r} never preempts: host_kv_gib must be 0, got "
                f"{self.cache.host_kv_gib:g}"
            )

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.cache.page_size or DEFAULT_PAGE_SIZE


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A config with a trace: everything that the loop runs on.

    Args:
        scheduler: over an empty pool.
        roofline: the clock.
        num_pages: of the pool, the null page included; None = unlimited.
        max_model_len: most tokens of a request.
    """

    scheduler: Scheduler
    roofline: Roofline
    num_pages: int | None
    max_model_len: int


def build_setup(config: SimulationConfig, trace: Trace) -> Setup:
    """Makes the scheduler that a config describes, large enough for the trace.

    Raises:
        ConfigError: the model does not fit the chips, or a request does not fit the limits.
    """
    page_size = config.page_size
    roofline = _roofline(config)
    _check_clock(config, trace)
    longest = _longest(config, trace)
    max_model_len = config.max_model_len or longest
    if longest > max_model_len:
        raise ConfigError(
            f"max_model_len {max_model_len} is too small for the trace's longest request of "
            f"{longest} tokens"
        )
    num_pages = config.cache.num_pages
    if config.unlimited_pages:
        num_pages = _pages_for_all(config, trace, max_model_len)
    elif num_pages is None:
        num_pages = roofline.num_pages_that_fit(page_size, config.cache.memory_utilization)
    needed = 1 + -(-_reserved(config, longest, max_model_len) // page_size)
    if num_pages < needed:
        raise ConfigError(
            f"num_pages {num_pages} is too small: a request of {longest} tokens alone needs {needed} "
            f"pages of {page_size}, the null page included"
        )
    token_budget = config.scheduler.max_num_batched_tokens
    costs = StepCosts(
        token_s=roofline.slice_s(0, token_budget) / token_budget,
        page_move_s=roofline.page_move_s(page_size),
    )
    host_page_bytes = roofline.page_bytes(page_size) * config.num_chips
    made = {
        "num_pages": num_pages,
        "num_host_pages": int(config.cache.host_kv_gib * GIB // host_page_bytes),
    }
    if config.allocator == "paged":  # pages that nobody could ever use are not made
        enough = _pages_for_all(config, trace, max_model_len)
        made = {name: min(count, enough) for name, count in made.items()}
    for name, count in made.items():
        if count > MAX_PAGES:
            raise ConfigError(
                f"{name} must be at most {MAX_PAGES} in a simulation (num_pages, host_kv_gib, and "
                f"the tokens of the trace), got {count}"
            )
    scheduler = build_scheduler(
        _scheduler_config(config, max_model_len),
        config.cache,
        num_pages=made["num_pages"],
        num_host_pages=made["num_host_pages"],
        page_size=page_size,
        max_model_len=max_model_len,
        costs=costs,
        kv=_contiguous_kv(config, made["num_pages"], max_model_len),
        whole_prompts=not config.chunked_prefill,
    )
    return Setup(
        scheduler=scheduler,
        roofline=roofline,
        num_pages=None if config.unlimited_pages else num_pages,
        max_model_len=max_model_len,
    )


def _roofline(config: SimulationConfig) -> Roofline:
    return Roofline(
        config.model,
        config.chip,
        num_chips=config.num_chips,
        dtype=config.dtype,
        kv_cache_dtype=config.cache.kv_cache_dtype,
    )


def _check_clock(config: SimulationConfig, trace: Trace) -> None:
    last_s = trace.requests[-1].arrival_s / config.rate_scale
    if config.arrivals == "timed" and last_s > MAX_CLOCK_S:
        raise ConfigError(
            f"rate_scale {config.rate_scale:g} lets the last request arrive after {last_s:g} s, but "
            f"the clock ends at {MAX_CLOCK_S:g}"
        )


def _longest(config: SimulationConfig, trace: Trace) -> int:
    """Tokens of the longest request as it is simulated."""
    if config.arrivals == "timed":
        return trace.longest
    return 1 + max(one.num_padded_prompt_tokens for one in trace.requests)


def _reserved(config: SimulationConfig, num_tokens: int, max_model_len: int) -> int:
    """Tokens for which an allocator takes room at once."""
    if config.allocator == "contiguous_max":
        return max_model_len
    return (
        1 << (num_tokens - 1).bit_length() if config.allocator == "contiguous_pow2" else num_tokens
    )


def _pages_for_all(config: SimulationConfig, trace: Trace, max_model_len: int) -> int:
    """Pages with which nothing is ever evicted: no two requests share one, and each copies one."""
    page_size = config.page_size
    if config.arrivals == "sequential":
        lengths = (1 + one.num_padded_prompt_tokens for one in trace.requests)
    else:
        lengths = (one.num_prompt_tokens + one.num_output_tokens for one in trace.requests)
    taken = (_reserved(config, length, max_model_len) for length in lengths)
    return 1 + sum(1 + -(-length // page_size) for length in taken)


def _scheduler_config(config: SimulationConfig, max_model_len: int) -> SchedulerConfig:
    """The step's limits; for whole prompts a budget that holds any of them beside a token for
    everybody else.
    """
    if config.chunked_prefill:
        return config.scheduler
    everybody = max_model_len + config.scheduler.max_num_seqs
    budget = max(config.scheduler.max_num_batched_tokens, everybody)
    if budget > MAX_NUM_BATCHED_TOKENS:
        raise ConfigError(
            f"chunked_prefill False needs steps of max_model_len {max_model_len} + max_num_seqs "
            f"{config.scheduler.max_num_seqs} tokens, but a step holds {MAX_NUM_BATCHED_TOKENS}"
        )
    return dataclasses.replace(config.scheduler, max_num_batched_tokens=budget)


def _contiguous_kv(
    config: SimulationConfig, num_pages: int, max_model_len: int
) -> KVManager | None:
    if config.allocator == "paged":
        return None
    return CONTIGUOUS[config.allocator](
        num_pages=num_pages, page_size=config.page_size, max_model_len=max_model_len
    )
