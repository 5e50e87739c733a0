"""A scheduler driven without an engine, over a fake device: sequences made by hand can be forked, held
and resumed at any time.
"""

from collections.abc import Sequence as Several

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.schedule.batch_builder import build_batch
from jaxserve.schedule.build import build_scheduler
from jaxserve.schedule.sequence import Sequence, Status
from jaxserve.schedule.starting_over import change_weights, restart
from tests.fakes import FakeExecutor, next_token
from tests.schedule.runs import request


class Direct:
    """Runs steps and checks every token that comes out; ends sequences at their length.

    Args:
        num_pages, num_host_pages: of the pools.
        options: fields of the configs.
    """

    def __init__(self, *, num_pages: int = 64, num_host_pages: int = 0, **options):
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 32} | options
        cache = {name: options.pop(name) for name in ("enable_prefix_caching", "eviction")
                 if name in options}  # fmt: skip
        self.executor = FakeExecutor(
            num_pages=num_pages, page_size=4, num_host_pages=num_host_pages
        )
        self.scheduler = build_scheduler(
            SchedulerConfig(**options),
            CacheConfig(**cache),
            num_pages=num_pages,
            page_size=4,
            max_model_len=128,
            num_host_pages=num_host_pages,
            costs=self.executor.costs,
        )
        self.seqs: list[Sequence] = []  # all that have not ended
        self.num_steps = 0
        self._num_made = 0
        self.last_advanced: list[Sequence] = []

    @property
    def num_slots(self) -> int:
        return self.scheduler.kv.num_slots

    def make(self, tokens: Several[int], max_tokens: int, *, beam: bool = False, **fields):
        """A sequence that fits alone; not known to the scheduler yet."""
        max_tokens = min(max_tokens, self.num_slots - len(tokens) + 1, 128 - len(tokens))
        assert max_tokens >= 1
        self._num_made += 1
        seq = Sequence(
            request=request(str(self._num_made), tokens, max_tokens, **fields),
            prompt_token_ids=tuple(tokens),
            order=(self._num_made, 0),
            seed=0,
            max_tokens=max_tokens,
            stop_ids=frozenset(),
            page_table=self.scheduler.kv.new_table(),
            wants_candidates=beam,
        )
        self.seqs.append(seq)
        return seq

    def add(self, tokens: Several[int], max_tokens: int, **fields) -> Sequence:
        seq = self.make(tokens, max_tokens, **fields)
        self.scheduler.add(seq)
        self.check()
        return seq

    def fork(
        self, parent: Sequence, num_tokens: int, more: Several[int], max_tokens: int, **fields
    ) -> Sequence:
        child = self.make([*parent.token_ids[:num_tokens], *more], max_tokens, **fields)
        self.scheduler.fork(parent, child, num_tokens)
        self.check()
        return child

    def hold(self, seq: Sequence) -> None:
        self.scheduler.hold(seq)
        self.check()

    def resume(self, seq: Sequence) -> None:
        self.scheduler.resume(seq)
        self.check()

    def finish(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        self.seqs.remove(seq)
        assert len(seq.page_table) == 0
        assert seq.host_pages is None
        self.check()

    def step(self) -> None:
        """One step; beams take their best candidate at once."""
        plan = self.scheduler.schedule()
        self.num_steps += 1
        self.last_advanced = []
        if plan is None:
            return
        batch = build_batch(plan, self.scheduler.buckets, self.scheduler.kv.max_pages_per_seq)
        known = {one.seq: one.seq.num_known_tokens for one in plan.slices}
        result = self.scheduler.update(plan, self.executor.submit(batch).result())
        assert not result.failed
        self.last_advanced = result.advanced
        for seq in result.advanced:
            if seq.wants_candidates:
                assert seq.candidates is not None
                seq.append(int(seq.candidates.token_ids[0]), float(seq.candidates.logprobs[0]))
            context = [i + self.executor.weights for i in seq.token_ids[: known[seq]]]
            assert len(seq.token_ids) == known[seq] + 1
            assert seq.token_ids[-1] == next_token(context), "a token of another context"
            if seq.ending(seq.num_output_tokens) is not None:
                self.scheduler.finish(seq)
                self.seqs.remove(seq)
        self.check()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def change_weights(self) -> None:
        self.executor.use_params(self.executor.weights + 1)
        change_weights(self.scheduler, self.scheduler.weights_version + 1)
        self.check()
        kv = self.scheduler.kv
        assert kv.pool.num_free == kv.pool.num_usable
        assert kv.host.num_free == kv.host.num_pages

    def restart(self) -> None:
        """As after a step that was cut short: whatever it left behind is thrown away."""
        self.executor.reset()
        restart(self.scheduler, self.seqs)
        self.check()

    def drain(self, max_steps: int = 5000) -> None:
        """Resumes whoever is held and runs to the end of all."""
        begin = self.num_steps
        while self.seqs:
            for seq in list(self.scheduler.held):
                self.resume(seq)
            assert self.num_steps < begin + max_steps, f"not done after {max_steps} steps"
            self.step()

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.check_invariants()
        everyone = {*scheduler.running, *scheduler.waiting, *scheduler.held}
        assert everyone == set(self.seqs), "a sequence is lost"
        for seq in scheduler.running:
            assert seq.status is Status.RUNNING

    def check_all_pages_are_back(self) -> None:
        kv = self.scheduler.kv
        assert not self.seqs
        assert kv.num_owned_pages == 0
        assert kv.host.num_free == kv.host.num_pages
        kv.clear_cache()
        assert kv.pool.num_free == kv.pool.num_usable
