"""The engine's process: `main` is started by `ProcessEngine`, with two file descriptors.

It ends when it is told to, when its client is gone (it looks for that even while it compiles), or when
its engine cannot go on. It takes no notice of SIGINT: whoever presses Ctrl-C means its client, which ends
it in order.
"""

import contextlib
import faulthandler
import gc
import logging
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

from jaxserve.async_engine.engine_loop import ClientGone, Served, serve_line
from jaxserve.async_engine.messages import Settings
from jaxserve.async_engine.pipes import SocketLine
from jaxserve.async_engine.process import STACKS_SIGNAL
from jaxserve.async_engine.served import load_served
from jaxserve.async_engine.step_clock import StepClock

_SEND_LAST_S = 2.0  # for what was not sent yet when the loop ends
_LEAVE_S = 1.0  # for the loop to end by itself when the client is gone


def main(arguments: Sequence[str], make: Callable[[Settings], Served] | None = None) -> None:
    """Serves one client, and ends the process.

    Args:
        arguments: descriptors of the socket and of the clock's memory.
        make: makes the engine; None = loads a model.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    connection = socket.socket(fileno=int(arguments[0]))
    clock_fd = int(arguments[1])
    clock = StepClock(mmap.mmap(clock_fd, mmap.PAGESIZE))
    os.close(clock_fd)
    threading.Thread(
        target=_watch_client, args=(connection.fileno(),), name="client-watch", daemon=True
    ).start()
    line = SocketLine(connection)
    with contextlib.suppress(ClientGone):
        settings = line.receive_settings()
        _log_to_stderr(settings.log_level)
        serve_line(lambda: (make or _load)(settings), line, clock)
        line.finish(_SEND_LAST_S)
    # At once: nothing is left to do, and libraries may take long to be torn down.
    sys.stderr.flush()
    os._exit(0)


def _load(settings: Settings) -> Served:
    served = load_served(settings.model, settings.generation_config, settings.options)
    # What is there now stays: the collector need not look at it again and again, while steps wait.
    gc.collect()
    gc.freeze()
    return served


def _log_to_stderr(level: int) -> None:
    logger = logging.getLogger("jaxserve")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(level)


def _watch_client(fd: int) -> None:
    """Ends the process when the other end of the socket is closed, whatever the loop is at."""
    poll = select.poll()
    poll.register(fd, 0)  # it is told of a hang-up anyway, and of nothing else
    poll.poll()
    time.sleep(_LEAVE_S)
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():  # its own group: what it started goes with it
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
