"""What happens to a running sequence whose pages are needed by an older one: its pages are given up
and computed again later, or moved to host RAM and back.

Source: vLLM (Kwon et al., SOSP 2023), section 4.5: all-or-nothing eviction, recovery by swapping or
recomputation.
"""

from jaxserve.executor import StepCosts

MAX_PREEMPTIONS = 4  # of one sequence, unless its own siblings need the room


class PreemptionMode:
    """Chooses between recomputing and swapping.

    Args:
        mode: "recompute", "swap" or "auto".
        costs: what both cost; read by "auto" only.
    """

    def __init__(self, mode: str, costs: StepCosts | None):
        if mode == "auto" and costs is None:
            raise ValueError('preemption mode "auto" needs costs to compare')
        self._mode = mode
        self._costs = costs

    def prefers_swap(self, num_tokens: int, num_pages: int) -> bool:
        """Whether a sequence with so many computed tokens, in so many pages, should be swapped.

        Swapping moves every page twice. Recomputing computes every token again, in chunks.
        """
        if self._mode != "auto":
            return self._mode == "swap"
        assert self._costs is not None
        return 2 * num_pages * self._costs.page_move_s < num_tokens * self._costs.token_s
