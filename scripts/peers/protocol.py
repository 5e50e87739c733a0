"""What a measured engine is to `scripts/bench_peers`: a process that loads once and then answers lines.

Imported by every worker, whatever environment it runs in, so Python's own library is all that it needs.
One JSON object a line, on stdin and stdout:

    <- {"versions": {...}}                                   loaded and ready
    -> {"workload": PATH, "prefix_caching": true,            run it once; false: no request shares
        "max_tokens": 2 or null}                             another's pages; the cap is for a warm-up
    <- {"wall_s", "token_ids": [[...]], "first_token_s": [...], "notes": {...}}
    -> {"roofline": true}                                    only to jaxserve: what the machine can do
    <- {"stream_bytes_per_s", "gemm_flops_per_s", ...}

until stdin ends. Invariant: between two lines a worker waits and computes nothing, and nothing that was
cached in one run is there in the next.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True)
class Prompt:
    """One request of a workload, greedy, with its end ids ignored.

    Args:
        token_ids: its prompt.
        max_tokens: how many tokens it gets, no fewer.
    """

    token_ids: list[int]
    max_tokens: int


@dataclass
class Outcome:
    """What one run of a workload was.

    Args:
        wall_s: from the submission of all requests to the last token.
        token_ids: the output of each request.
        first_token_s: seconds until each request's first token; empty where the engine does not tell.
        notes: whatever else is worth keeping.
    """

    wall_s: float
    token_ids: list[list[int]]
    first_token_s: list[float] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)


def read_prompts(path: Path, max_tokens: int | None = None) -> list[Prompt]:
    """The requests of a workload file; each gets at most `max_tokens` tokens if that is given."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [
        Prompt(one["prompt_token_ids"], min(one["max_tokens"], max_tokens or one["max_tokens"]))
        for one in lines
    ]


def claim_stdout() -> TextIO:
    """Returns the stream for replies. Whatever else is printed, by child processes too, goes to stderr
    from now on.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return replies


def serve(
    replies: TextIO,
    versions: dict[str, str],
    run: Callable[[list[Prompt], bool], Outcome],
    others: dict[str, Callable[[], dict[str, Any]]] | None = None,
) -> None:
    """Answers lines until stdin ends.

    Args:
        replies: what `claim_stdout` gave.
        versions: of the engine and what it stands on.
        run: (requests, prefix_caching) -> what came out. All are submitted together, and nothing is
            cached from earlier runs.
        others: commands beside "workload", by name.
    """
    print(json.dumps({"versions": versions}), file=replies, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "workload" in command:
            prompts = read_prompts(Path(command["workload"]), command.get("max_tokens"))
            reply = vars(run(prompts, command["prefix_caching"]))
        else:
            (name,) = command
            reply = (others or {})[name]()
        print(json.dumps(reply), file=replies, flush=True)
