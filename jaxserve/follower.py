"""`follow_leader`: one of the other processes of an engine. Public; called by `run` and `serve` where
process_id is not 0.

Invariant: it returns when the leader has ended in order, and only then.
"""

import logging
from collections.abc import Callable

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.weights.load_model import load_model

_LOG = logging.getLogger(__name__)


def follow_leader(model: str, *, on_lost: Callable[[str], None], **options: object) -> None:
    """Runs this process's part of an engine until process 0 ends.

    Args:
        model: the same as of process 0, on a path of this host.
        on_lost: called in a thread of its own when process 0 is gone without a word. A step that waits for
            its devices may never return, so this should end the process.
        options: as of `LLM`, the same as of process 0 but for process_id.

    Raises:
        ConfigError: as of `LLM`; process_id is 0.
        CheckpointError: as of `LLM`.
        ProcessLostError: process 0 is gone, or has ended with an error.
    """
    config = EngineConfig.from_options(options)
    processes = config.processes
    if processes.is_leader:
        raise ConfigError(
            f"process_id must be from 1 to num_processes - 1 = {processes.num_processes - 1}, got 0: "
            "process 0 is the leader and makes an LLM"
        )
    from jaxserve.build.from_loaded import build_follower
    from jaxserve.build.join import join_processes
    from jaxserve.multihost.follower import Leader, follow

    leader = join_processes(config, on_lost)
    assert isinstance(leader, Leader)
    loaded = load_model(model, config, wait=False)
    executor = build_follower(config, loaded, leader)
    _LOG.info("process %d of %d follows", processes.process_id, processes.num_processes)
    follow(executor, leader)
