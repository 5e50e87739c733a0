"""The jaxserve arm of a comparison: loads an engine once, then replays the workload for each line on stdin.

Started by scripts/bench_transformers with the project's Python and the flags of `jaxserve bench
offline`; it is the same code underneath. Protocol, shared by all arms, one JSON object a line on
stdout: {"versions"} when ready, then {"wall_s", "cpu_s", "token_ids", "notes"} per line read, until stdin
ends.
Invariant: between two lines it waits and computes nothing.
"""

import json
import sys
import time
from importlib.metadata import version

from jaxserve import __version__
from jaxserve.cli.arguments import parse_arguments
from jaxserve.cli.bench import bench_flags, read_workload
from jaxserve.cli.bench_arm import build_arm, make_compile_counter
from jaxserve.cli.flags import configure_logging, engine_options


def main() -> None:
    replies, sys.stdout = (
        sys.stdout,
        sys.stderr,
    )  # whatever else is printed must not look like a reply
    values = bench_flags()
    parse_arguments(sys.argv[1:], values)
    given = values.flag_values_dict()
    configure_logging(given["verbosity"])
    lines = read_workload(given["workload"], seed=given["seed"], logprobs=False)
    arm = build_arm(
        given["model"], {**engine_options(values), "scheduling": given["scheduling"][0]}
    )
    compiles = make_compile_counter()
    versions = {"jaxserve": __version__, "jax": version("jax")}
    print(json.dumps({"versions": versions}), file=replies, flush=True)
    for _ in sys.stdin:
        num_compiles, cpu_s = arm.num_compiles, time.process_time()
        arm.measure(lines, compiles)
        cpu_s = time.process_time() - cpu_s
        replayed = arm.repetitions.pop()
        reply = {
            "wall_s": replayed.wall_s,
            "cpu_s": cpu_s,
            "token_ids": [one.token_ids for one in replayed.timelines],
            "notes": {
                "num_compiles": arm.num_compiles - num_compiles,
                "num_cached_tokens": sum(one.num_cached_tokens for one in replayed.timelines),
            },
        }
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
