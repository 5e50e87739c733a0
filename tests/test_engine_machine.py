"""Everything at once, over the fake device: requests of every kind are added, forked, aborted and cut
short in pools that are too small for them, under changing weights, in an engine that falls asleep. Every
token is checked as it comes out, all invariants after every operation, and in the end everyone has ended
and every page is back.
"""

import contextlib
import dataclasses
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.request import CompletionOutput, Request, RequestOutput
from jaxserve.sampling_params import BeamParams, SamplingParams
from jaxserve.schedule.queue import POLICIES
from jaxserve.seeds import choice_seed
from jaxserve.weights_switch import UPDATE_MODES
from tests.fakes import expected_beams, make_engine, next_token

POISON = 7
NO_CUT = ("error", "abort")


@dataclass
class Expected:
    """What is known of a request.

    Args:
        prompt, params, beam, hold: as it was asked for.
        tokens: prompt and output so far, by choice.
        weights: those that it was added under.
        reasons: how its choices ended, by choice.
    """

    prompt: list[int]
    params: SamplingParams
    beam: BeamParams | None
    hold: bool
    weights: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)


class Machine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(4, 24),
        options=st.fixed_dictionaries(
            {
                "admission": st.sampled_from(sorted(POLICIES)),
                "preemption_mode": st.sampled_from(["recompute", "swap", "auto"]),
                "enable_prefix_caching": st.sampled_from([True, True, True, False]),
                "num_host_pages": st.sampled_from([2, 9, 40]),
                "max_num_seqs": st.integers(1, 7),
                "max_num_batched_tokens": st.sampled_from([7, 16, 64]),
                "eviction": st.sampled_from(["lru", "lfu", "fifo", "priority"]),
                "async_scheduling": st.booleans(),
            }
        ),
    )
    def start(self, num_pages, options):
        self.engine = make_engine(num_pages=num_pages, draws=True, poison=[POISON], **options)
        self.has_lag = options["async_scheduling"]
        self.known: dict[str, Expected] = {}
        self.held: set[str] = set()
        self.weights = 0
        self.weights_of = {0: 0}  # by version
        self.sleep_level = 0
        self.num_made = 0

    def new(self, prompt, params, beam=None, *, hold=False) -> str:
        self.num_made += 1
        name = str(self.num_made)
        one = Expected(list(prompt), params, beam, hold, self.weights)
        one.tokens = {index: list(prompt) for index in range(params.n)}
        self.known[name] = one
        return name

    @rule(
        length=st.integers(1, 40),
        begin=st.sampled_from([10, 10, 10, 200, 400]),
        is_poisoned=st.sampled_from([False] * 9 + [True]),
        n=st.sampled_from([1, 1, 2, 4]),
        max_tokens=st.integers(1, 9),
        is_beam=st.sampled_from([False, False, True]),
        hold=st.booleans(),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a"]),
        temperature=st.sampled_from([0.0, 1.0]),
    )
    def add(
        self, length, begin, is_poisoned, n, max_tokens, is_beam, hold, priority, salt, temperature
    ):
        length = min(length, self.engine.scheduler.kv.num_slots)
        prompt = [*range(begin, begin + length)]
        if is_poisoned:
            prompt[length // 2] = POISON
        params = SamplingParams(
            n=n, max_tokens=max_tokens, temperature=temperature, seed=length, ignore_eos=True
        )
        fields = {"priority": priority, "cache_salt": salt}
        if is_beam:
            beam = BeamParams(beam_width=n, max_tokens=max_tokens)
            name = self.new(prompt, SamplingParams(n=1), beam)
            request = Request(id=name, prompt_token_ids=prompt, beam=beam, **fields)
        else:
            name = self.new(prompt, params, hold=hold)
            request = Request(
                id=name, prompt_token_ids=prompt, sampling_params=params, hold=hold, **fields
            )
        self.engine.add(request)
        self.engine.check_invariants()

    @precondition(lambda self: self.known)
    @rule(
        pick=st.integers(0, 99),
        keep=st.integers(0, 99),
        more=st.lists(st.integers(900, 901), max_size=5),
        n=st.sampled_from([1, 1, 3]),
        hold=st.booleans(),
    )
    def fork(self, pick, keep, more, n, hold):
        name = sorted(self.known)[pick % len(self.known)]
        parent = self.known[name]
        index = pick % parent.params.n
        tokens = parent.tokens[index]
        num_tokens = 1 + keep % len(tokens)
        prompt = [*tokens[:num_tokens], *more]
        params = SamplingParams(n=n, max_tokens=4, temperature=1, seed=pick, ignore_eos=True)
        is_there = self.engine.has_request(name) or name in self.held
        is_forkable = is_there and (index not in parent.reasons or parent.hold)
        if parent.beam or not is_forkable or parent.reasons.get(index) in NO_CUT:
            with pytest.raises(InvalidRequestError):
                self.engine.fork(name, "refused", index=index)
        elif len(prompt) <= self.engine.scheduler.kv.num_slots:
            new = self.new(prompt, params, hold=hold)
            self.branch(
                name,
                new,
                index=index,
                num_tokens=num_tokens,
                append_token_ids=more,
                sampling_params=params,
                hold=hold,
            )
        self.engine.check_invariants()

    def branch(self, name, new, **options):
        """A step may be under way that ends the choice, or the request: `fork` waits for it, and what it
        released is still to come.
        """
        try:
            self.engine.fork(name, new, **options)
        except InvalidRequestError as error:
            is_found = any(one.requests.find(name) for one in self.engines)
            has_ended_unseen = not is_found and self.engine.has_request(name)
            has_ended_unseen |= "has ended" in str(error)
            if not self.has_lag or not has_ended_unseen:
                raise
            del self.known[new]

    @property
    def engines(self):
        """Those that `engine` is made of."""
        return [self.engine]

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 99), one_choice=st.booleans())
    def abort(self, pick, one_choice):
        name = sorted(self.known)[pick % len(self.known)]
        one = self.known[name]
        index = pick % one.params.n if one_choice and not one.beam else None
        output = self.engine.abort(name, index)
        if output is not None:
            self.take(output)
        if index is None:
            self.held.discard(name)
            assert not self.engine.has_request(name)
            del self.known[name]
        self.engine.check_invariants()

    @rule(count=st.integers(1, 5))
    def steps(self, count):
        for _ in range(count):
            if self.sleep_level and not self.engine.has_work():
                with pytest.raises(RuntimeError, match="sleeps"):
                    self.engine.step()
                return
            for output in self.engine.step():
                self.take(output)
            self.engine.check_invariants()

    @rule()
    def cut_short(self):
        def submit(_):
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(self.engine.executor, "submit", submit)
            self.steps(1)

    @rule(num_pages=st.integers(1, 9))
    def evict(self, num_pages):
        kv = self.engine.scheduler.kv
        if kv.tree is not None:
            kv.pool.release(kv.tree.evict(num_pages))
            self.engine.check_invariants()

    @rule(mode=st.sampled_from(UPDATE_MODES))
    def change_weights(self, mode):
        waits = mode == "finish_old" and bool(self.engine.requests.in_flight)
        if waits and self.sleep_level == 2:
            with pytest.raises(ConfigError, match="gave the old weights up"):
                self.engine.update_params(1000, mode=mode)
            return
        self.weights += 1
        version = self.engine.update_params(self.weights, mode=mode)
        assert version not in self.weights_of
        self.weights_of[version] = self.weights
        if not waits:
            assert self.engine.weights_version == version
            self.sleep_level = min(self.sleep_level, 1)
        if mode == "abort":
            assert not self.engine.requests.in_flight
            self.steps(1)  # they have ended, which is seen here
        self.engine.check_invariants()

    @rule(level=st.integers(1, 2))
    def sleep(self, level):
        if level == 2 and self.engine.weights_version != max(self.weights_of):
            with pytest.raises(ConfigError, match="still to end"):
                self.engine.sleep(level=2)
            return
        self.engine.sleep(level=level)
        self.sleep_level = max(level, self.sleep_level)
        assert self.engine.stats().num_free_pages == self.engine.scheduler.kv.pool.num_usable
        self.engine.check_invariants()

    @rule()
    def wake(self):
        if self.sleep_level == 2:
            with pytest.raises(RuntimeError, match="update_params has to come first"):
                self.engine.wake()
            return
        self.engine.wake()
        self.sleep_level = 0
        self.engine.check_invariants()

    def take(self, output: RequestOutput) -> None:
        """Checks what a request released, token by token."""
        one = self.known[output.request_id]
        for choice in output.outputs:
            assert choice.index not in one.reasons, "it had ended"
            if one.beam is None:
                for token, version in zip(choice.token_ids, choice.weights_versions, strict=True):
                    self.check_token(one, choice.index, token, self.weights_of[version])
            elif choice.finish_reason not in NO_CUT:
                self.check_beam(one, one.beam, choice)
            if choice.finish_reason is None:
                continue
            one.reasons[choice.index] = choice.finish_reason
            if choice.finish_reason == "error" and one.beam is None:
                contexts = one.tokens.values()
                every = self.weights_of.values()
                assert any(i + w == POISON for ids in contexts for i in ids for w in every)
        num_choices = one.beam.beam_width if one.beam else one.params.n
        if not one.beam:
            assert output.finished == (len(one.reasons) == num_choices)
        if output.finished:
            may_hold = one.hold and {"stop", "length"} & set(one.reasons.values())
            if may_hold:
                self.held.add(output.request_id)

    def check_token(self, one: Expected, index: int, token: int, weights: int) -> None:
        tokens = one.tokens[index]
        context = [i + weights for i in tokens]
        assert POISON not in context, "of a context that is no number"
        if one.params.temperature > 0:
            assert one.params.seed is not None
            seed = choice_seed(one.params.seed, index)
            context += [seed >> 32, seed & 0xFFFFFFFF, len(tokens) - len(one.prompt)]
        assert token == next_token(context)
        tokens.append(token)

    def check_beam(self, one: Expected, beam: BeamParams, choice: CompletionOutput) -> None:
        if one.weights == self.weights == 0:
            assert beam.max_tokens is not None
            num_slots = self.engine.scheduler.kv.num_slots
            most = min(beam.max_tokens, num_slots - len(one.prompt) + 1)
            beams = expected_beams(one.prompt, dataclasses.replace(beam, max_tokens=most))
            assert choice.token_ids == beams[choice.index][0]

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        if self.sleep_level == 2:
            self.change_weights("continue")
        self.wake()
        num_tokens = sum(len(one.prompt) + 9 * max(one.params.n, 4) for one in self.known.values())
        for _ in range(200 + 10 * num_tokens):
            if not self.engine.has_work():
                break
            self.steps(1)
        assert not self.engine.has_work(), "not done"
        for name, one in self.known.items():
            assert one.beam or len(one.reasons) == one.params.n
            self.engine.abort(name)
        self.engine.check_invariants()
        kv = self.engine.scheduler.kv
        assert kv.num_owned_pages == 0
        assert kv.host.num_free == kv.host.num_pages
        kv.clear_cache()
        assert kv.pool.num_free == kv.pool.num_usable


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
