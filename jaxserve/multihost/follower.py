"""The follower's side: runs what the leader tells, in the leader's order, until the leader ends.

Invariant: at most two steps are under way here, as there; nothing that the leader did not tell is run.
When the leader is gone, `on_lost` is called at once, by the thread that listens: a step that waits for the
leader's devices may never return.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from jaxserve.errors import ConfigError, ProcessLostError
from jaxserve.executor import Executor, StepHandle
from jaxserve.multihost.batch_codec import decode_batch
from jaxserve.multihost.params_codec import Key, put_leaf
from jaxserve.multihost.wire import Message, PeerGone, Wire, WireError

MAX_UNDER_WAY = 2  # steps, as `StepLoop` sends them

_LOG = logging.getLogger(__name__)


class Leader:
    """The line to the leader.

    Args:
        wire: to it.
        on_lost: told, in a thread of its own, why nothing more will come; not when the leader ends in order.
        leave: called when the run has ended in order; may wait for the others to end too.
    """

    def __init__(
        self,
        wire: Wire,
        on_lost: Callable[[str], None],
        leave: Callable[[], object] = lambda: None,
    ):
        self.leave = leave
        self._wire = wire
        self._on_lost = on_lost
        self._messages: SimpleQueue[Message] = SimpleQueue()
        threading.Thread(target=self._listen, name="leader-line", daemon=True).start()

    def tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Sends the leader a message.

        Raises:
            ProcessLostError: it is gone.
        """
        try:
            self._wire.send(kind, fields)
        except PeerGone as error:
            raise ProcessLostError(f"process 0, the leader, is gone: {error}") from error

    def agree(self, name: str, value: int) -> int:
        """See `Followers.agree`."""
        self.tell("value", {"name": name, "value": value})
        message = self.next_message()
        if message.kind != "agreed":
            raise WireError(f"the leader says {message.kind!r} where it should say what {name} is")
        return message.fields["value"]

    def close(self) -> None:
        """Nothing is told any more; the leader sees it."""
        self._wire.close()

    def next_message(self) -> Message:
        """What the leader says next; waits for it.

        Raises:
            ProcessLostError: the leader is gone, or ends the run with an error.
        """
        message = self._messages.get()
        if message.kind == "gone":
            raise ProcessLostError(message.fields["reason"])
        if message.kind == "end" and message.fields.get("reason") is not None:
            raise ProcessLostError(f"the leader ended: {message.fields['reason']}")
        return message

    def _listen(self) -> None:
        try:
            while True:
                message = self._wire.receive()
                self._messages.put(message)
                if message.kind == "end":
                    return
        except (PeerGone, WireError) as error:
            reason = f"process 0, the leader, is gone: {error}"
            self._messages.put(Message("gone", {"reason": reason}, []))
            self._on_lost(reason)


def follow(executor: Executor, leader: Leader) -> None:
    """Runs steps until the leader ends the run; the line is closed then.

    Args:
        executor: of this process's part, warmed up.
        leader: says what to run.

    Raises:
        ProcessLostError: the leader is gone, or has ended with an error.
        Exception: whatever a step raised; the leader is told first.
    """
    try:
        _Follower(executor, leader).run()
        leader.leave()
    except ProcessLostError:
        raise
    except Exception as error:
        try:
            leader.tell("failed", {"error": f"{type(error).__name__}: {error}"})
        except ProcessLostError:
            _LOG.warning("the leader is gone too")
        raise
    finally:
        leader.close()


class _Follower:
    def __init__(self, executor: Executor, leader: Leader):
        self._executor = executor
        self._leader = leader
        self._under_way: deque[StepHandle] = deque()
        self._params: dict[Key, Any] = {}  # as far as they have come
        self._prepared: dict[int, object] = {}

    def run(self) -> None:
        while (message := self._leader.next_message()).kind != "end":
            self._take(message)
        self._settle(0)

    def _take(self, message: Message) -> None:
        kind, fields, arrays = message
        if kind == "submit":
            self._settle(MAX_UNDER_WAY - 1)
            self._under_way.append(self._executor.submit(decode_batch(fields, arrays)))
        elif kind == "masks":
            self._under_way[-1].give_masks(arrays[0])
        elif kind == "reset":
            self._under_way.clear()
            self._executor.reset()
        elif kind == "param":
            put_leaf(self._params, fields["path"], arrays[0])
        elif kind == "prepare_params":
            params, self._params = self._params, {}
            try:
                self._prepared[fields["number"]] = self._executor.prepare_params(params)
            except ConfigError as error:  # the leader finds the same, and goes on with the old ones
                _LOG.info("new weights refused: %s", error)
        elif kind == "use_params":
            self._settle(0)
            self._use_params(fields["number"])
        elif kind == "release":
            self._settle(0)
            self._executor.release(params=fields["params"])
        else:
            raise WireError(f"a follower is told {kind!r}, which it does not know")

    def _use_params(self, number: int) -> None:
        self._executor.use_params(self._prepared[number])
        # Said again after an interrupt; those before it never.
        self._prepared = {key: one for key, one in self._prepared.items() if key >= number}

    def _settle(self, num_left: int) -> None:
        """Waits for the oldest steps until so many are under way."""
        while len(self._under_way) > num_left:
            self._under_way.popleft().result()
