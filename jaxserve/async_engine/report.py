"""`EngineReport`: what a dashboard reads of an engine. Made on the engine's side, carried by messages."""

from dataclasses import dataclass

from jaxserve.stats import EngineStats


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """An engine between two steps.

    Args:
        stats: counters and gauges.
    """

    stats: EngineStats
