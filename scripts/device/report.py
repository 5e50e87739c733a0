"""What scripts/device_check reports, line by line, and the time that is left for it."""

import dataclasses
import time
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the report.

    Args:
        part: "attention", "copies", "decode", "chunk", "engine", ...
        name: what was measured.
        figures: name -> number, or text where there is none to give.
        fault: what is wrong, "" where all is well.
    """

    part: str
    name: str
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    fault: str = ""


class Deadline:
    """The time that the whole check may take; what no longer fits is left out, and said so."""

    def __init__(self, limit_s: float):
        self._end = time.monotonic() + limit_s

    def left_s(self) -> float:
        """Seconds left; negative when it is over."""
        return self._end - time.monotonic()
