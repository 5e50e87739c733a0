"""`EngineStats`: counters and gauges of an engine, as `Engine.stats` gives them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class BucketStats(NamedTuple):
    """How often steps of a rung of T ran, and how well they filled it."""

    num_steps: int
    num_tokens: int
    num_padding_tokens: int

    @property
    def padding_waste(self) -> float:
        """Padding / all tokens computed; 0.0 before the first step."""
        return _share(self.num_padding_tokens, self.num_tokens + self.num_padding_tokens)


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What one step was made of.

    Args:
        num_seqs: sequences that took part.
        num_decode_tokens: tokens of those that had one token to compute.
        num_chunk_tokens: tokens of the others: prompts, and what is computed again.
        num_padding_tokens: what they lack to the bucket.
        num_rows: sequences that sampled.
        bucket_num_tokens, bucket_num_rows: T and R of the compiled shapes it ran in.
        num_moves_out, num_copies, num_moves_in: pages moved before it: to host RAM, for
            copy-on-write, from host RAM.
    """

    num_seqs: int
    num_decode_tokens: int
    num_chunk_tokens: int
    num_padding_tokens: int
    num_rows: int
    bucket_num_tokens: int
    bucket_num_rows: int
    num_moves_out: int
    num_copies: int
    num_moves_in: int


@dataclass(frozen=True, kw_only=True)
class RooflineStats:
    """What the steps had to move and to compute, beside the time that they took. Of one device: where
    several share a model, of each.

    Args:
        step_s: seconds of all steps, each from its start, or the end of the one before if that was later.
        num_bytes: weights, keys and values that they had to read, and keys and values to write.
        num_flops: operations of their matrix products and of attention; a multiply-add is two.
        least_s: seconds that the steps would have taken at the peak, whichever of the two takes longer;
            0.0 where the peaks are not known.
        last_step_s, last_num_bytes, last_num_flops: the same of the last step.
        peak_bytes_per_s, peak_flops_per_s: what the device can do, from its data sheet or as measured;
            None where nobody knows.
    """

    step_s: float
    num_bytes: int
    num_flops: int
    least_s: float
    last_step_s: float
    last_num_bytes: int
    last_num_flops: int
    peak_bytes_per_s: float | None
    peak_flops_per_s: float | None

    @property
    def bytes_per_s(self) -> float:
        """Achieved bandwidth; 0.0 before the first step."""
        return _share(self.num_bytes, self.step_s)

    @property
    def flops_per_s(self) -> float:
        """Achieved operations a second; 0.0 before the first step."""
        return _share(self.num_flops, self.step_s)

    @property
    def bandwidth_share(self) -> float | None:
        """Achieved bandwidth / peak; None where that is not known."""
        return None if not self.peak_bytes_per_s else self.bytes_per_s / self.peak_bytes_per_s

    @property
    def flops_share(self) -> float | None:
        """Achieved operations a second / peak; None where that is not known."""
        return None if not self.peak_flops_per_s else self.flops_per_s / self.peak_flops_per_s

    @property
    def roofline_share(self) -> float | None:
        """Time at the peak / time taken: 1.0 is the roofline; None where the peaks are not known."""
        known = self.peak_bytes_per_s and self.peak_flops_per_s
        return _share(self.least_s, self.step_s) if known else None

    @property
    def last_bandwidth_share(self) -> float | None:
        """As `bandwidth_share`, of the last step."""
        peak = self.peak_bytes_per_s
        return _share(self.last_num_bytes, self.last_step_s) / peak if peak else None

    @property
    def last_flops_share(self) -> float | None:
        """As `flops_share`, of the last step."""
        peak = self.peak_flops_per_s
        return _share(self.last_num_flops, self.last_step_s) / peak if peak else None

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON."""
        shares = (
            "bytes_per_s",
            "flops_per_s",
            "bandwidth_share",
            "flops_share",
            "roofline_share",
            "last_bandwidth_share",
            "last_flops_share",
        )
        return {**asdict(self), **{name: getattr(self, name) for name in shares}}


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot between two steps; all but the gauges and what was chosen count since the engine
    was made.
    """

    # gauges: sequences
    num_running: int
    num_waiting: int
    num_held: int  # neither: ended and kept for forks, or beams that wait for their siblings
    # gauges: pages; num_pages = a null page for each replica + free + cached + owned
    num_pages: int
    num_free_pages: int
    num_cached_pages: int  # kept for prefix hits, given up when needed
    num_owned_pages: int  # of sequences
    num_kv_tokens: int  # in owned pages; a shared one counts once
    num_host_pages: int
    num_free_host_pages: int
    # steps
    num_steps: int
    num_scheduled_tokens: int
    num_padding_tokens: int
    by_bucket: Mapping[int, BucketStats]  # by rung of T
    last_step: StepStats | None
    # requests
    num_prompt_tokens: int  # of each request, once whatever its branches; a fork is a request
    num_output_tokens: int  # handed out
    # prefix cache
    # Of sequences at their first admission, but of no branch that starts in its parent's pages.
    num_queried_tokens: int
    num_hit_tokens: int  # those of them that were cached
    num_prefix_waits: int  # sequences that waited for a running one to compute their prefix
    num_prefix_wait_steps: int
    # forks
    num_forks: int
    num_copied_pages: int  # because someone wrote into a shared one
    num_parked_given_up: int  # held or parked sequences whose pages were taken
    # preemption
    num_preemptions: int  # = num_swaps + num_recomputes
    num_swaps: int
    num_recomputes: int
    num_swaps_refused: int  # recomputed although a swap was wanted: no room in host RAM
    # weights
    weights_version: int  # how often others took over
    is_asleep: bool  # it has given its memory back
    # what was chosen
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    token_buckets: tuple[int, ...]  # the ladders
    row_buckets: tuple[int, ...]
    max_model_len: int
    attention_backend: str
    attention_interpret: bool
    dtype: str
    kv_cache_dtype: str
    # Engines behind this one's face. All figures are of all of them together, but for the settings of one
    # step: max_num_batched_tokens and the ladders.
    num_replicas: int = 1
    # How near the steps come to what the device can do; None where the engine runs no model that it knows.
    roofline: RooflineStats | None = None

    @property
    def num_usable_pages(self) -> int:
        """Pages that requests can have: all but the null pages."""
        return self.num_pages - self.num_replicas

    @property
    def num_slots(self) -> int:
        """Tokens that one request can have at most: the pages of one replica, all of them equal."""
        return self.num_usable_pages // self.num_replicas * self.page_size

    @property
    def kv_utilisation(self) -> float:
        """Tokens held / token slots of owned pages, between 0 and 1; 1.0 when no page is owned:
        nothing is wasted then.

        A token is held when its keys and values are computed and in an owned page. A page that
        several sequences share counts once, on both sides; cached pages that nobody owns do not
        count, nor does the null page.
        """
        num_slots = self.num_owned_pages * self.page_size
        return self.num_kv_tokens / num_slots if num_slots else 1.0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens looked up in the prefix cache that it had; 0.0 before the first."""
        return _share(self.num_hit_tokens, self.num_queried_tokens)

    @property
    def padding_waste(self) -> float:
        """Padding / all tokens computed; 0.0 before the first step."""
        return _share(self.num_padding_tokens, self.num_scheduled_tokens + self.num_padding_tokens)

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON, in groups."""
        figures: dict[str, Any] = {
            group: {name: getattr(self, name) for name in names} for group, names in GROUPS.items()
        }
        figures["by_bucket"] = {
            str(rung): {**use._asdict(), "padding_waste": use.padding_waste}
            for rung, use in sorted(self.by_bucket.items())
        }
        figures["last_step"] = None if self.last_step is None else asdict(self.last_step)
        figures["roofline"] = None if self.roofline is None else self.roofline.to_dict()
        return figures


# The groups of `EngineStats.to_dict`: every field but by_bucket, last_step and roofline, and every share.
GROUPS = {
    "sequences": ("num_running", "num_waiting", "num_held"),
    "pages": (
        "num_pages",
        "num_free_pages",
        "num_cached_pages",
        "num_owned_pages",
        "num_kv_tokens",
        "kv_utilisation",
        "num_host_pages",
        "num_free_host_pages",
    ),
    "tokens": (
        "num_steps",
        "num_scheduled_tokens",
        "num_padding_tokens",
        "padding_waste",
        "num_prompt_tokens",
        "num_output_tokens",
    ),
    "prefix_cache": (
        "num_queried_tokens",
        "num_hit_tokens",
        "hit_rate",
        "num_prefix_waits",
        "num_prefix_wait_steps",
    ),
    "forks": ("num_forks", "num_copied_pages", "num_parked_given_up"),
    "preemption": ("num_preemptions", "num_swaps", "num_recomputes", "num_swaps_refused"),
    "engine": (
        "page_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "token_buckets",
        "row_buckets",
        "max_model_len",
        "attention_backend",
        "attention_interpret",
        "dtype",
        "kv_cache_dtype",
        "num_replicas",
        "weights_version",
        "is_asleep",
    ),
}


def executor_stats(description: Mapping[str, object]) -> dict[str, Any]:
    """Fields of `EngineStats`, by name: what the executor's description says was chosen."""
    return {
        "attention_backend": str(description["attention_backend"]),
        "attention_interpret": bool(description["attention_interpret"]),
        "dtype": str(description["dtype"]),
        "kv_cache_dtype": str(description["kv_cache_dtype"]),
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
