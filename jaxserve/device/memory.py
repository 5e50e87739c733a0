"""How much memory a device, or the host, has left."""

import os
from typing import Any

from jaxserve.errors import ConfigError


def free_bytes(device: Any, utilization: float) -> int:
    """Bytes still free if the process may take `utilization` of the device's memory.

    Args:
        device: a `jax.Device`: an accelerator, or a CPU device (then host RAM counts, as the
            operating system sees it now).
        utilization: share in (0, 1].

    Raises:
        ConfigError: the platform does not say; give num_pages or kv_cache_gib.
    """
    if device.platform == "cpu":
        return int(free_host_bytes() * utilization)
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ConfigError(
            f"memory_utilization: {device.device_kind} does not report its memory; "
            "give num_pages or kv_cache_gib"
        )
    return int(stats["bytes_limit"] * utilization) - int(stats["bytes_in_use"])


def free_host_bytes() -> int:
    """Bytes of host RAM that are free, as the operating system sees it now."""
    meminfo = "/proc/meminfo"
    if os.path.exists(meminfo):
        with open(meminfo, encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
