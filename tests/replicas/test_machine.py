"""The machine of `test_engine_machine` on two replicas, whose steps are ready in an order of their own."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from jaxserve.replicas.engine import ReplicatedEngine
from jaxserve.schedule.queue import POLICIES
from tests.replicas.replicated import make_replicated
from tests.test_engine_machine import POISON, Machine


class Face(ReplicatedEngine):
    """With what the machine looks at: of the first replica."""

    @property
    def scheduler(self):
        return self.engines[0].scheduler

    @property
    def executor(self):
        return self.engines[0].executor


class ReplicaMachine(Machine):
    @initialize(
        num_pages=st.integers(4, 24),
        options=st.fixed_dictionaries(
            {
                "admission": st.sampled_from(sorted(POLICIES)),
                "preemption_mode": st.sampled_from(["recompute", "swap", "auto"]),
                "enable_prefix_caching": st.sampled_from([True, True, False]),
                "num_host_pages": st.sampled_from([2, 40]),
                "max_num_seqs": st.integers(1, 7),
                "max_num_batched_tokens": st.sampled_from([7, 64]),
                "async_scheduling": st.booleans(),
            }
        ),
    )
    def start(self, num_pages, options):
        super().start(num_pages, options)
        made = make_replicated(2, num_pages=num_pages, draws=True, poison=[POISON], **options)
        self.engine = Face(made.engines)
        self.has_lag = True  # a step of the replica that was not waited for

    @rule()
    def change_weights(self, mode="continue"):
        self.weights += 1
        version = self.engine.update_params(self.weights, mode=mode)
        self.weights_of[version] = self.weights
        self.engine.check_invariants()

    @property
    def engines(self):
        return self.engine.engines

    def sleep(self, level):
        """No rule here, nor `wake`: each engine has its own machine for that."""

    def wake(self):
        """As `sleep`."""

    def teardown(self):
        super().teardown()
        if not hasattr(self, "engine"):
            return
        for one in self.engine.engines:
            kv = one.scheduler.kv
            assert kv.num_owned_pages == 0
            kv.clear_cache()
            assert kv.pool.num_free == kv.pool.num_usable


TestReplicaMachine = ReplicaMachine.TestCase
TestReplicaMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
