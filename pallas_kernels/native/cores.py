"""Keeps the host's thread off the core that the C++ kernels are called on (cores.h).

Called when the host's thread goes on after it waited for a step: the kernels of the next one run by then.
"""

from pallas_kernels.native import load


def step_aside() -> None:
    """Moves the calling thread to another core if the kernels were last called on its own. Does nothing
    where no kernel was called, or where the thread may run on one core only.
    """
    library = load.registered()
    if library is not None:
        library.jaxserve_leave_core(library.jaxserve_caller_core())
