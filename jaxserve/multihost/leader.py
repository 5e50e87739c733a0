"""The leader's side: `Followers`, its lines to the others, and `LeaderExecutor`, which runs steps with them.

    submit: tell every follower the batch -> submit it here
    result: wait for the step, or until a follower is lost

The leader alone schedules. What it runs, and in which order, the followers run too, on their own part of the
same mesh; what a step gives the host is whole on every device, so the followers return nothing.

Invariant: after a fault (a follower has ended, or a call was cut short between telling and running) nothing
is run any more: every call raises `ProcessLostError`, for the processes may be at different steps.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from jaxserve.errors import ConfigError, ProcessLostError
from jaxserve.executor import Executor, StepCosts, StepHandle
from jaxserve.multihost.batch_codec import encode_batch
from jaxserve.multihost.params_codec import encode_params
from jaxserve.multihost.wire import Message, PeerGone, Wire, WireError
from jaxserve.schedule.batch import DeviceBatch, SampledTokens


class Followers:
    """Lines to all followers.

    Args:
        wires: by process_id.
        leave: called when the run has ended in order; may wait for the followers to end too.
    """

    def __init__(self, wires: Mapping[int, Wire], leave: Callable[[], object] = lambda: None):
        self._wires = dict(wires)
        self._leave = leave
        self.fault: str | None = None
        self._ends = False
        self._answers: dict[int, SimpleQueue[Message]] = {i: SimpleQueue() for i in self._wires}
        self._wakes: list[SimpleQueue[None]] = []
        for process_id, wire in self._wires.items():
            threading.Thread(
                target=self._listen,
                args=(process_id, wire),
                name=f"follower-{process_id}",
                daemon=True,
            ).start()

    @property
    def num_processes(self) -> int:
        """The leader counted."""
        return len(self._wires) + 1

    def wake_on_fault(self, queue: "SimpleQueue[None]") -> None:
        """Puts something into the queue when a follower is lost."""
        self._wakes.append(queue)

    def tell(
        self,
        kind: str,
        fields: Mapping[str, Any] | None = None,
        arrays: "list[np.ndarray] | tuple[()]" = (),
    ) -> None:
        """Sends every follower a message.

        Raises:
            ProcessLostError: one of them is gone.
        """
        self.require_all()
        for process_id, wire in self._wires.items():
            try:
                wire.send(kind, fields, arrays)
            except PeerGone as error:
                self._set_fault(f"process {process_id} of {1 + len(self._wires)} is gone: {error}")
                self.require_all()

    def ask(self, kind: str) -> dict[int, dict[str, Any]]:
        """The fields of the next message of each follower, which has to be of this kind.

        Raises:
            ProcessLostError: one of them is gone, or says something else.
        """
        found = {}
        for process_id, answers in self._answers.items():
            message = answers.get()
            self.require_all()
            if message.kind != kind:
                self._set_fault(f"process {process_id} says {message.kind!r}, not {kind!r}")
                self.require_all()
            found[process_id] = message.fields
        return found

    def agree(self, name: str, value: int) -> int:
        """The smallest of what all processes say.

        Args:
            name: of the number; every process asks for the same ones in the same order.
            value: this process's.

        Raises:
            ProcessLostError: a follower is gone, or at another question.
        """
        said = self.ask("value")
        for process_id, fields in said.items():
            if fields["name"] != name:
                self._set_fault(f"process {process_id} says {fields['name']}, not {name}")
        self.require_all()
        least = min([value, *(fields["value"] for fields in said.values())])
        self.tell("agreed", {"value": least})
        return least

    def give_up(self, fault: str) -> None:
        """Nothing is run from now on."""
        self.fault = self.fault or fault

    def require_all(self) -> None:
        """Raises ProcessLostError where a follower is lost."""
        if self.fault is not None:
            raise ProcessLostError(self.fault)

    def close(self, *, reason: str | None = None) -> None:
        """Tells the followers that the run is over.

        Args:
            reason: what they should say of it; None = it ended as it should.
        """
        if self._ends:
            return
        self._ends = True
        for wire in self._wires.values():
            with contextlib.suppress(PeerGone):  # it has ended too
                wire.send("end", {"reason": reason})
        if reason is None and self.fault is None:
            self._leave()

    def _listen(self, process_id: int, wire: Wire) -> None:
        """In a thread: what one follower says, until it is gone."""
        what = f"process {process_id} of {self.num_processes}"
        try:
            while True:
                message = wire.receive()
                if message.kind == "failed":
                    self._set_fault(f"{what} failed: {message.fields.get('error')}")
                self._answers[process_id].put(message)
        except (PeerGone, WireError) as error:
            wire.close()
            if not self._ends:
                self._set_fault(f"{what} is gone: {error}")
            self._answers[process_id].put(Message("gone", {}, []))

    def _set_fault(self, fault: str) -> None:
        if self.fault is None:  # what comes after it follows from it
            self.fault = fault
        for queue in self._wakes:
            queue.put(None)


class LeaderParams(NamedTuple):
    """Weights that every process has prepared.

    Args:
        number: what the followers know them by.
        own: this process's part.
    """

    number: int
    own: object


class LeaderExecutor:
    """Runs steps here and on all followers; meets `jaxserve.executor.Executor`.

    Args:
        executor: runs this process's part. It is called by a thread of its own: a device that waits for that
            of a lost follower may hold up any call for ever, and whoever steps the engine is told instead.
        followers: run theirs; warmed up as this one.
    """

    def __init__(self, executor: Executor, followers: Followers):
        self._executor = executor
        self._followers = followers
        self._num_prepared = 0
        self._telling: str | None = None  # still set when the next call comes: one was cut short
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        followers.wake_on_fault(self._wakes)
        threading.Thread(
            target=_make_calls, args=(self._calls, self._wakes), name="leader-calls", daemon=True
        ).start()

    @property
    def description(self) -> dict[str, object]:
        """As of this process's executor."""
        return self._executor.description

    @property
    def costs(self) -> StepCosts:
        """As measured here: a step takes all processes as long."""
        return self._executor.costs

    def warm_up(self) -> None:
        """Every process does that before it meets the others.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("warm_up: each process warms its own executor up")

    def submit(self, batch: DeviceBatch) -> "LeaderStep":
        """Tells the followers first: a step may wait, while it is sent, for what others compute."""
        fields, arrays = encode_batch(batch)
        submit = functools.partial(self._executor.submit, batch)
        return LeaderStep(self.call_with_all("submit", fields, arrays, submit), self)

    def prepare_params(self, params: object) -> "LeaderParams":
        """Sends the followers all params, array by array: numpy, or arrays that this process has whole.

        Raises:
            ConfigError: they are not as the engine's own, which each follower finds too; nothing was
                changed, in no process.
            ProcessLostError: a follower is gone.
        """
        messages = encode_params(params)
        self._begin("prepare_params")
        for fields, arrays in messages:
            self._followers.tell("param", fields, arrays)
        self._telling = None
        self._num_prepared += 1
        number, prepare = self._num_prepared, self._executor.prepare_params
        call = functools.partial(prepare, params)
        return LeaderParams(
            number, self.call_with_all("prepare_params", {"number": number}, [], call)
        )

    def use_params(self, prepared: "LeaderParams") -> None:
        """As of every process's executor."""
        use = functools.partial(self._executor.use_params, prepared.own)
        self.call_with_all("use_params", {"number": prepared.number}, [], use)

    def release(self, *, params: bool) -> None:
        """As of every process's executor."""
        release = functools.partial(self._executor.release, params=params)
        self.call_with_all("release", {"params": params}, [], release)

    def reset(self) -> None:
        """As of every process's executor."""
        self.call_with_all("reset", {}, [], self._executor.reset)

    def close(self) -> None:
        """Ends the followers; nothing can be run afterwards."""
        self._followers.close(reason=self._followers.fault)

    def call_with_all(
        self,
        kind: str,
        fields: Mapping[str, Any],
        arrays: list[np.ndarray],
        call: Callable[[], Any],
    ) -> Any:
        """Tells the followers, then makes a call of this process's part; what it returns or raises."""
        self._begin(kind)
        self._followers.tell(kind, fields, arrays)
        made = _Call(call)
        self._calls.put(made)
        self._telling = None  # an interrupt from here on cuts nothing short: the call is made
        try:
            return self._outcome(made)
        except ConfigError:  # the followers find the same
            raise
        except Exception as error:
            self._followers.give_up(f"{kind} failed in process 0: {type(error).__name__}: {error}")
            raise

    def call(self, call: Callable[[], Any]) -> Any:
        """Makes a call of this process's part alone, that every process makes by itself.

        Raises:
            ProcessLostError: a follower is gone, so it may never return.
        """
        made = _Call(call)
        self._calls.put(made)
        return self._outcome(made)

    def _outcome(self, made: "_Call") -> Any:
        while not made.is_done:
            self._followers.require_all()
            self._wakes.get()
        if made.error is not None:
            self._followers.require_all()  # what a device raises then is not the cause
            raise made.error
        return made.value

    def _begin(self, kind: str) -> None:
        if self._telling is not None:
            self._followers.give_up(
                f"{self._telling} was cut short between two processes: they are at different steps"
            )
        self._followers.require_all()
        self._telling = kind


class LeaderStep:
    """A step under way in all processes; meets `jaxserve.executor.StepHandle`."""

    def __init__(self, handle: StepHandle, executor: LeaderExecutor):
        self._handle = handle
        self._executor = executor

    def give_masks(self, masks: np.ndarray) -> None:
        """See `StepHandle`; the followers get them too."""
        give = functools.partial(self._handle.give_masks, masks)
        self._executor.call_with_all("masks", {}, [masks], give)

    def is_ready(self) -> bool:
        """See `StepHandle`."""
        return self._handle.is_ready()

    def wait(self) -> None:
        """See `StepHandle`."""
        self._handle.wait()

    def result(self) -> SampledTokens:
        """See `StepHandle`.

        Raises:
            ProcessLostError: a follower is gone.
        """
        return self._executor.call(self._handle.result)


class _Call:
    """A call that another thread makes, and how it went."""

    def __init__(self, call: Callable[[], Any]):
        self._call = call
        self.is_done = False
        self.value: Any = None
        self.error: BaseException | None = None

    def make(self) -> None:
        try:
            self.value = self._call()
        except BaseException as error:  # noqa: BLE001 - raised by whoever asked
            self.error = error
        self.is_done = True


def _make_calls(calls: "SimpleQueue[_Call]", wakes: "SimpleQueue[None]") -> None:
    while True:
        made = calls.get()
        made.make()
        del made  # while it waits for the next one, this one's arrays may go
        wakes.put(None)
