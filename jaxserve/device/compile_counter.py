"""Counts XLA compilations in this process, so that "none after warm-up" can be measured instead
of believed.
"""

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts from its creation on; `count` is read at will.

    Compilations served by a cache on disk count too.
    """

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event == _COMPILE_EVENT:
            self.count += 1
