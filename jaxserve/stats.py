"""`EngineStats`: counters and gauges of an engine, as `Engine.stats` gives them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class BucketStats(NamedTuple):
    """How often steps of a rung of T ran, and how well they filled it."""

    num_steps: int
    num_tokens: int
    num_padding_tokens: int


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot between two steps; all but the gauges and what was chosen count since the engine
    was made.
    """

    # gauges: sequences
    num_running: int
    num_waiting: int
    num_held: int  # neither: ended and kept for forks, or beams that wait for their siblings
    # gauges: pages; num_pages = 1 null page + free + cached + owned
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
    # requests
    num_prompt_tokens: int
    num_output_tokens: int  # handed out
    # prefix cache
    num_queried_tokens: int  # of sequences at their first admission
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
    # what was chosen
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    attention_backend: str
    attention_interpret: bool
    dtype: str
    kv_cache_dtype: str

    @property
    def kv_utilisation(self) -> float:
        """Tokens held / token slots of the pages that hold them; 1.0 when there are none."""
        num_slots = self.num_owned_pages * self.page_size
        return self.num_kv_tokens / num_slots if num_slots else 1.0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens looked up in the prefix cache that it had; 0.0 before the first."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0
