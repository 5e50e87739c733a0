"""Workers and their rows: what scripts/tpu_aot and scripts/gpu_aot have in common.

A worker compiles for one device in an environment of its own and prints one JSON object a line; its
"fault" is "" where all is well. Stdlib only. Invariant: a worker that dies leaves a row with a fault.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.aot.environment import ROOT

Columns = Sequence[tuple[str, str]]  # (key of a row, its format)


def run_worker(
    python: Path, module: str, arguments: Sequence[str], settings: Mapping[str, str]
) -> list[dict]:
    """The rows that a worker reports.

    Args:
        python: of the worker's environment.
        module: dotted name of the worker.
        arguments: its command line.
        settings: environment variables, beside those of this process.
    """
    done = subprocess.run(
        [python, "-m", module, *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | dict(settings),
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    if done.returncode:
        tail = done.stderr.strip().splitlines()[-1:] or ["no message"]
        rows.append({"name": "worker", "fault": f"exit code {done.returncode}: {tail[0]}"})
    return rows


def table(rows: Sequence[Mapping], columns: Columns) -> str:
    """The rows as text, one line each, columns aligned; "-" where a row has no such value."""
    cells = [[name for name, _ in columns]]
    for row in rows:
        cells.append([form.format(row[name]) if name in row else "-" for name, form in columns])
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns) - 1)]
    return "\n".join(
        "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in cells
    )


def show(rows: Sequence[Mapping], columns: Columns, *, as_json: bool) -> int:
    """Print the rows; the exit code: 1 where any has a fault."""
    print("\n".join(json.dumps(row) for row in rows) if as_json else table(rows, columns))
    return int(any(row["fault"] for row in rows))
