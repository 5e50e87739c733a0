"""What a gate says: one `Check` a figure, and the table of all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Check:
    """One figure that has to be reached.

    Args:
        gate: the gate's name.
        what: what was measured.
        found: the figure, as it is to be read.
        wanted: what it must be.
        passed: whether it is.
        detail: what helps where it is not.
    """

    gate: str
    what: str
    found: str
    wanted: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the gates are told.

    Args:
        folder: for logs of servers.
        seed: of everything that is drawn.
        minutes: of the soak.
        num_aborts: of the gate of that name.
        num_cases: of the fuzz.
        repetitions: of each arm of the throughput.
        model: of the throughput; the other gates serve tiny_llama.
    """

    folder: Path
    seed: int = 0
    minutes: float = 2.0
    num_aborts: int = 10_000
    num_cases: int = 5_000
    repetitions: int = 3
    model: str = "smollm2-135m-instruct"


def table(checks: Sequence[Check]) -> str:
    """One line a check, in Markdown."""
    rows = [("gate", "what", "found", "wanted", "reached"), ("---",) * 5]
    rows += [
        (one.gate, one.what, one.found, one.wanted, "yes" if one.passed else "NO") for one in checks
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines += [f"\n{one.gate}, {one.what}: {one.detail}" for one in checks if one.detail]
    return "\n".join(lines)
