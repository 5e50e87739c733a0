"""`ReplicatedEngine`: several engines of one model, each on devices of its own, behind the face of one.

    add -> Router -> engine 0 | engine 1 | ...          step: send to all -> wait for the first -> take it in

Made by `jaxserve.build` where data_parallel_size is more than 1; `LLM`, `AsyncEngine` and the server drive it
as they drive an `Engine`. The engines share nothing: each has its own weights, pages and prefix cache, so a
request stays where it was put, and so do its forks. A replica never waits for another one: a call of `step`
takes in those whose step is done, while the others compute.

What a request gets does not depend on its replica: the same weights, and draws by its own seed, or by the
number of its arrival among all requests.

Invariant: a request is in flight, or held, in at most one of the engines.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from typing import Any

from jaxserve.engine import Engine
from jaxserve.errors import InvalidRequestError, shown
from jaxserve.executor import Executor, StepHandle
from jaxserve.groups.make import Grammars, Watchers
from jaxserve.replicas.merged_stats import merge_stats
from jaxserve.replicas.router import Router
from jaxserve.replicas.waiting import FirstReady
from jaxserve.request import Request, RequestOutput, as_token_ids
from jaxserve.sampling_params import SamplingParams
from jaxserve.schedule.observer import StepObserver, StepRecord
from jaxserve.stats import EngineStats

_MAX_ID = 2**31


class ReplicatedEngine:
    """Runs requests on several engines; see `Engine` for the methods that are not described here.

    Args:
        engines: at least one, idle, of the same model, settings and weights; nobody else drives them.
    """

    def __init__(self, engines: Several[Engine]):
        first = engines[0]
        self.engines = tuple(engines)
        self.vocab_size = first.vocab_size
        self.max_model_len = first.max_model_len
        self.eos_token_ids = first.eos_token_ids
        self.clock = first.clock
        self.observers: list[StepObserver] = []  # look on at every step of every engine
        for engine in engines:
            engine.observers.append(_Relay(self.observers))
            engine.requests.arrivals = first.requests.arrivals
        kv = first.scheduler.kv
        self._router = Router(
            [engine.scheduler for engine in engines],
            page_size=kv.page_size,
            shares_prompts=kv.tree is not None,
        )
        self._first_ready = FirstReady(len(engines))
        self._outputs: list[RequestOutput] = []  # taken from an engine, not handed out yet

    @property
    def executor(self) -> Executor:
        """Of the first engine; the others have the same programs."""
        return self.engines[0].executor

    def add(self, request: Request, watcher: Watchers = None, grammar: Grammars = None) -> None:
        """Queues a request on the replica that the router names."""
        self._require_new(request.id)
        as_token_ids(request.prompt_token_ids)
        # Where a prompt cannot be compared, any engine says what is wrong with it.
        is_comparable = len(request.prompt_token_ids) > 0 and all(
            0 <= i < _MAX_ID for i in request.prompt_token_ids
        )
        replica = self._router.route(request) if is_comparable else 0
        self.engines[replica].add(request, watcher, grammar)
        self._router.add(replica, request)

    def fork(
        self,
        request_id: str,
        new_id: str,
        *,
        num_tokens: int | None = None,
        append_token_ids: Several[int] = (),
        sampling_params: SamplingParams | None = None,
        watcher: Watchers = None,
        grammar: Grammars = None,
        hold: bool = False,
        index: int = 0,
    ) -> None:
        """Queues a fork on the replica of the request that it branches from."""
        self._require_new(new_id)
        replica = self._replica_of(request_id)
        if replica is None:
            raise InvalidRequestError(
                f"request {shown(request_id)} is neither in flight nor held", param="id"
            )
        engine = self.engines[replica]
        engine.fork(
            request_id,
            new_id,
            num_tokens=num_tokens,
            append_token_ids=append_token_ids,
            sampling_params=sampling_params,
            watcher=watcher,
            grammar=grammar,
            hold=hold,
            index=index,
        )
        self._router.add_fork(replica, new_id, len(append_token_ids), sampling_params)

    def abort(self, request_id: str, index: int | None = None) -> RequestOutput | None:
        """As `Engine.abort`, wherever the request is."""
        replica = self._replica_of(request_id)
        if replica is None:
            return None
        output = self.engines[replica].abort(request_id, index)
        if output is not None:
            self._router.observe(output)
        return output

    @property
    def weights_version(self) -> int:
        """As `Engine.weights_version`: that of the replica which lags, while they differ."""
        return min(engine.weights_version for engine in self.engines)

    def update_params(self, params: Any, *, mode: str = "continue") -> int:
        """Gives every engine the new weights, one after the other; see `Engine.update_params`.

        Raises:
            ConfigError: they do not fit; nothing has changed, for all engines check the same.
        """
        return max([engine.update_params(params, mode=mode) for engine in self.engines])

    @property
    def is_asleep(self) -> bool:
        return any(engine.is_asleep for engine in self.engines)

    def sleep(self, *, level: int = 1) -> None:
        """As `Engine.sleep`, every replica."""
        for engine in self.engines:
            engine.check_sleep(level)
        for engine in self.engines:
            engine.sleep(level=level)

    def wake(self) -> None:
        """As `Engine.wake`, every replica; where one cannot, those behind it sleep on too."""
        for engine in self.engines:
            engine.wake()

    def reset_prefix_cache(self) -> int:
        """Gives up every cached page that no sequence uses; returns how many, of all engines."""
        return sum([engine.reset_prefix_cache() for engine in self.engines])

    def has_request(self, request_id: str) -> bool:
        return any(engine.has_request(request_id) for engine in self.engines)

    def has_work(self) -> bool:
        return bool(self._outputs) or any(engine.has_work() for engine in self.engines)

    def step(self) -> list[RequestOutput]:
        """Sends a step to each engine that has work and none under way, waits until one is done, and
        takes in all that are.

        Returns:
            As `Engine.step`. One that fails raises here; what the others released comes with the next
            call.
        """
        if self.is_asleep and not self.has_work():
            raise RuntimeError("ReplicatedEngine.step: it sleeps; wake() has to come first")
        handles: dict[int, StepHandle] = {}
        ready: list[int] = []
        for replica, engine in enumerate(self.engines):
            if not engine.has_work():
                continue
            handle = engine.begin_step()
            if handle is None:
                ready.append(replica)  # it has something to hand out at most
            else:
                handles[replica] = handle
        if handles and not ready:
            ready = self._first_ready(handles)
        for replica in ready:
            self._take(self.engines[replica].step())
        outputs, self._outputs = self._outputs, []
        return outputs

    def _take(self, outputs: Iterable[RequestOutput]) -> None:
        self._outputs += outputs
        for output in outputs:
            self._router.observe(output)

    def stats(self) -> EngineStats:
        """The counters of all engines together; see `merge_stats`."""
        return merge_stats([engine.stats() for engine in self.engines])

    def check_invariants(self) -> None:
        """Raises AssertionError when an engine is not as it says, or the router counts otherwise."""
        for engine in self.engines:
            engine.check_invariants()
        self._router.check_invariants()

    def _replica_of(self, request_id: str) -> int | None:
        for replica, engine in enumerate(self.engines):
            held = engine.scheduler.held  # of those that have ended, and perhaps of others
            if engine.has_request(request_id) or any(s.request.id == request_id for s in held):
                return replica
        return None

    def _require_new(self, request_id: str) -> None:
        if self._replica_of(request_id) is not None:
            raise InvalidRequestError(f"id {request_id!r} is already in flight or held", param="id")


def engines_of(engine: Engine | ReplicatedEngine) -> tuple[Engine, ...]:
    """The engines behind a face: of a single one, itself."""
    return engine.engines if isinstance(engine, ReplicatedEngine) else (engine,)


class _Relay:
    """An observer of one engine that tells those of the whole."""

    def __init__(self, observers: list[StepObserver]):
        self._observers = observers

    def step_done(self, step: StepRecord) -> None:
        for observer in self._observers:
            observer.step_done(step)

    def weights_changed(self) -> None:
        for observer in self._observers:
            observer.weights_changed()
