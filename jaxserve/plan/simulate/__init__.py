"""The real scheduler on a roofline clock: production traces in minutes, without a device.

Start at `simulate`. Settings in `settings.py`, the event loop in `loop.py`, what it measures in
`report.py`, and the allocators that paging replaced in `contiguous.py`.
"""

from jaxserve.plan.simulate.loop import SimulationError, Simulator, simulate
from jaxserve.plan.simulate.report import SimulationResult, percentiles
from jaxserve.plan.simulate.settings import ALLOCATORS, ARRIVALS, SimulationConfig

__all__ = [
    "ALLOCATORS",
    "ARRIVALS",
    "SimulationConfig",
    "SimulationError",
    "SimulationResult",
    "Simulator",
    "percentiles",
    "simulate",
]
