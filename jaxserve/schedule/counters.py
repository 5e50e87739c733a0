"""What the scheduler counts, from the start of its engine on. Read by stats; nothing decides by it."""

from dataclasses import dataclass, field

from jaxserve.schedule.plan import StepPlan


@dataclass(kw_only=True)
class BucketUse:
    """How often a rung of T was used, and how well it was filled."""

    num_steps: int = 0
    num_tokens: int = 0
    num_padding_tokens: int = 0


@dataclass(kw_only=True)
class SchedulerCounters:
    """Totals.

    Args:
        num_preemptions: num_swaps + num_recomputes.
        num_swaps: preempted sequences whose pages went to host RAM.
        num_recomputes: preempted sequences whose pages were given up.
        num_swaps_refused: recomputed although a swap was wanted: the host tier was full.
        num_parked_given_up: held or parked sequences whose pages were taken.
        num_forks: sequences that began as a branch of another.
        num_copied_pages: pages copied because someone wrote into a shared one.
        num_queried_tokens: known tokens of sequences at their first admission; not of a branch that
            starts in its parent's pages.
        num_hit_tokens: those of them that the cache had.
        num_prefix_waits: sequences that waited for a running one to compute their prefix.
        num_prefix_wait_steps: steps that they waited.
        num_steps, num_tokens: of all plans; one that computes several tokens of each sequence one after
            the other counts as so many steps.
        by_bucket: by rung of T.
        last_plan: of the step that was counted last.
    """

    num_preemptions: int = 0
    num_swaps: int = 0
    num_recomputes: int = 0
    num_swaps_refused: int = 0
    num_parked_given_up: int = 0
    num_forks: int = 0
    num_copied_pages: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_prefix_waits: int = 0
    num_prefix_wait_steps: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    by_bucket: dict[int, BucketUse] = field(default_factory=dict)
    last_plan: StepPlan | None = None

    def observe(self, plan: StepPlan) -> None:
        """Counts a step that was run."""
        self.last_plan = plan
        self.num_steps += plan.num_steps
        self.num_tokens += plan.num_tokens * plan.num_steps
        use = self.by_bucket.setdefault(plan.bucket.num_tokens, BucketUse())
        use.num_steps += plan.num_steps
        use.num_tokens += plan.num_tokens * plan.num_steps
        use.num_padding_tokens += plan.num_padding_tokens * plan.num_steps
