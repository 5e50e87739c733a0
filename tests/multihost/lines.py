"""A leader and followers within this process, over real sockets."""

import socket
import threading
from collections.abc import Sequence

from jaxserve.multihost.follower import Leader, follow
from jaxserve.multihost.leader import Followers, LeaderExecutor
from jaxserve.multihost.wire import Wire
from tests.fakes import FakeExecutor


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection within this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = socket.create_connection(server.getsockname())
        b, _ = server.accept()
    return a, b


class Run:
    """Follower threads, each with an executor of its own, and the leader's executor over them."""

    def __init__(self, executors: Sequence[FakeExecutor], own: FakeExecutor):
        self.own = own
        self.executors = list(executors)
        self.ends: dict[int, BaseException | None] = {}
        self.lost: dict[int, str] = {}
        self.wires: list[Wire] = []
        ours = {}
        self.threads = []
        for process_id, executor in enumerate(executors, 1):
            a, b = tcp_pair()
            ours[process_id] = Wire(a)
            self.wires.append(Wire(b))
            thread = threading.Thread(target=self._follow, args=(process_id, executor), daemon=True)
            self.threads.append(thread)
        self.followers = Followers(ours)
        self.leader = LeaderExecutor(own, self.followers)
        for thread in self.threads:
            thread.start()

    def _follow(self, process_id: int, executor: FakeExecutor) -> None:
        line = Leader(
            self.wires[process_id - 1],
            lambda reason: self.lost.__setitem__(process_id, reason),
        )
        self.ends[process_id] = None
        try:
            follow(executor, line)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.ends[process_id] = error

    def join(self) -> None:
        """Until every follower has ended."""
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()
