"""Runs the checks of one client against one server. Used by the client scripts, in the client's own Python.

Invariant: a check that fails does not keep the others from running, and the exit status tells of it.
"""

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Zürich"]},
        "days": {"type": "integer", "enum": [1, 2, 3]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": WEATHER,
    },
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say something of 🙂 and Zürich."},
]


class Server(NamedTuple):
    """What a client is pointed at."""

    url: str
    model: str
    key: str

    @property
    def base_url(self) -> str:
        """Where OpenAI's paths begin."""
        return f"{self.url}/v1"


def server_of_arguments() -> Server:
    """From the command line: URL MODEL KEY."""
    return Server(*sys.argv[1:4])


def is_weather(arguments: str) -> bool:
    """Whether these are arguments of get_weather."""
    value = json.loads(arguments)
    return set(value) == {"city", "days"} and value["days"] in (1, 2, 3)


def require(ok: object, what: str) -> None:
    """Fails the check, and says why, unless `ok`."""
    if not ok:
        raise AssertionError(what)


def equal(found: Any, expected: Any, what: str) -> None:
    """Fails the check unless two values are equal."""
    require(found == expected, f"{what}: {found!r:.300} is not {expected!r:.300}")


def run_checks(checks: dict[str, Callable[[], object]]) -> None:
    """Runs all, tells each one's outcome, and exits with 1 if any failed."""
    failed = []
    for name, check in checks.items():
        try:
            check()
            print(f"  ok      {name}", flush=True)
        except Exception as error:  # noqa: BLE001 - whatever a client raises is told
            failed.append(name)
            why = str(error) or type(error).__name__
            print(f"  failed  {name}: {type(error).__name__}: {why[:600]}", flush=True)
            traceback.print_exc(limit=4, file=sys.stderr)
    sys.exit(1 if failed else 0)
