"""`ProcessConfig`: which of several processes this is, and where they meet. A branch of `EngineConfig`.

The three names are those of `jax.distributed.initialize`. Every process is started with the same settings
but for `process_id`.
"""

from dataclasses import dataclass

from jaxserve.errors import ConfigError, shown
from jaxserve.field_checks import is_int
from jaxserve.field_names import checks_names

MAX_PROCESSES = 4096


@checks_names
@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """Processes, each with devices of its own, that run one engine together.

    Args:
        coordinator_address: "host:port" of process 0, as the others reach it; None = this process is
            the only one.
        num_processes: how many there are.
        process_id: which this is, from 0; 0 is the leader, which has the scheduler and the server.

    Raises:
        ConfigError: a value outside its range, or one without the others.
    """

    coordinator_address: str | None = None
    num_processes: int = 1
    process_id: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("num_processes", 1, MAX_PROCESSES),
            ("process_id", 0, MAX_PROCESSES - 1),
        ):
            value = getattr(self, name)
            if not is_int(value) or not low <= value <= high:
                raise ConfigError(
                    f"{name} must be an integer in [{low}, {high}], got {shown(value)}"
                )
        if self.process_id >= self.num_processes:
            raise ConfigError(
                f"process_id must be less than num_processes, {self.num_processes}, "
                f"got {self.process_id}"
            )
        address = self.coordinator_address
        if address is None:
            if self.num_processes > 1:
                raise ConfigError(
                    f"num_processes={self.num_processes} needs coordinator_address: where process 0 "
                    "is reached, as host:port"
                )
            return
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ConfigError(
                f"coordinator_address must be host:port with a port from 1 to 65535, "
                f"got {shown(address)}"
            )
        if self.num_processes == 1:
            raise ConfigError(
                "coordinator_address is for several processes: set num_processes, got 1"
            )

    @property
    def are_several(self) -> bool:
        """Whether this process is one of several."""
        return self.num_processes > 1

    @property
    def is_leader(self) -> bool:
        """Whether this process schedules."""
        return self.process_id == 0

    @property
    def host(self) -> str:
        """Where process 0 is reached, without the port and without the brackets of IPv6."""
        assert self.coordinator_address is not None
        return self.coordinator_address.rpartition(":")[0].strip("[]")
