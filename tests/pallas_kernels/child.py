"""Runs interpreted kernels in a process of their own: a wrong wait makes an interpreter hang or abort."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def reports(module: str, *arguments: str, limit_s: float) -> dict[str, dict[str, Any]]:
    """What a module of this folder reports, run as a program, before it ends or its time is up.

    Args:
        module: its dotted name; it prints one JSON object with a "name" a line, as soon as it has one.
        arguments: of its command line.
        limit_s: seconds after which it is killed.

    Returns:
        Name -> the rest of the object; what is missing hung, or the child died.
    """
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as child:
        try:
            output, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
    # jax 0.11 prints the races it finds among them.
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"name"')]
    return {result.pop("name"): result for result in found}


def faults(module: str, *arguments: str, limit_s: float) -> dict[str, str]:
    """Name -> fault, of a module whose objects have a "fault"; arguments as `reports`."""
    found = reports(module, *arguments, limit_s=limit_s)
    return {name: result["fault"] for name, result in found.items()}
