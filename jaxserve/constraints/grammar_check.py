"""Whether a grammar can be compiled within bounds, found out in a process of its own.

llguidance bounds most of what a grammar may cost, but not all: regular expressions that are joined, a
long chain of references or many thousand properties may take minutes, or run out of stack and take
their process with them. So what users write is compiled first in a process that may be killed.

`check_grammar` is called by `constraints.grammar`; run as a program, this file is that process. It
imports nothing of jaxserve, so that it starts fast.
"""

import json
import resource
import signal
import subprocess
import sys
import threading

from llguidance import LLMatcher, LLParserLimits

MAX_MEMORY_BYTES = 2 * 1024**3  # of address space
STACK_BYTES = 4 * 1024**2  # half of what a thread usually has: what passes here fits there

PATIENCE = 24  # seconds of the clock for each second of CPU time: other work may have the CPU

# The costs of a step are bounded too, since masks are made while other requests wait.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)


class CheckUndecided(Exception):
    """Other work had the CPU for so long that nothing was found out about a grammar."""


def check_grammar(grammar: str, time_limit_s: int) -> str:
    """Compiles a grammar in a process of its own.

    Args:
        grammar: as `LLMatcher` takes it.
        time_limit_s: most seconds of CPU time. By the clock it may take PATIENCE times as long, where
            other work has the CPU.

    Returns:
        What is wrong with it; empty if nothing is.

    Raises:
        CheckUndecided: it had less CPU time than that in all this time.
    """
    too_long = f"compiling it takes longer than {time_limit_s} s of CPU time"
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__, str(time_limit_s)],
            input=grammar.encode(),
            capture_output=True,
            timeout=PATIENCE * time_limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckUndecided(
            f"compiling it was not done in {PATIENCE * time_limit_s} s: other work has the CPU"
        ) from None
    if done.returncode == -signal.SIGXCPU:
        return too_long
    if done.returncode != 0 or not done.stdout:
        return (
            "it is too deep or too large to be compiled "
            f"({STACK_BYTES >> 20} MiB of stack, {MAX_MEMORY_BYTES >> 30} GiB of memory)"
        )
    return json.loads(done.stdout)


def _main() -> None:
    time_limit_s = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (time_limit_s, time_limit_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grammar = sys.stdin.buffer.read().decode()
    threading.stack_size(STACK_BYTES)
    found: list[str] = []
    worker = threading.Thread(
        target=lambda: found.append(LLMatcher.validate_grammar(grammar, None, limits=LIMITS))
    )
    worker.start()
    worker.join()
    print(json.dumps(found[0]))


if __name__ == "__main__":
    _main()
