"""schemathesis against the server: by our own description, and by the part of OpenAI's that is served.

Run by `scripts/run_clients` with the client's own Python. By our own, every reply has to be one of those
described, and what is described as wrong has to be refused. OpenAI's describes far more than one text model
can do (pictures, sound, searches), so there a refusal is as good as a reply; never a 5xx, and each 200 is as
described. JAXSERVE_FUZZ_CASES=N runs N cases an operation instead of 60.
"""

import os
import subprocess
import sys
from pathlib import Path

from scripts.clients.checks import require, run_checks, server_of_arguments

SERVER = server_of_arguments()
DATA = Path(__file__).parent / "data"
NUM_CASES = os.environ.get("JAXSERVE_FUZZ_CASES", "60")
# A text that fits the description may still be too long for the model, or a tool unknown.
OWN_EXCLUDED = ("positive_data_acceptance",)
OPENAI_CHECKS = ("not_a_server_error", "content_type_conformance", "response_schema_conformance")


def schemathesis(*arguments: str) -> None:
    """One run; fails with its last lines."""
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", *arguments]
    command += [f"--header=Authorization: Bearer {SERVER.key}", f"--max-examples={NUM_CASES}"]
    command += ["--seed=7", "--workers=2", "--phases=coverage,fuzzing", "--request-timeout=60"]
    command += ["--warnings=off", "--suppress-health-check=all", "--generation-database=none"]
    done = subprocess.run(
        command,
        env=os.environ
        | {
            "SCHEMATHESIS_HOOKS": "scripts.clients.schemathesis_hooks",
            "JAXSERVE_MODEL": SERVER.model,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )
    sys.stderr.write(done.stdout)
    summary = [line for line in done.stdout.splitlines() if "generated" in line or "passed" in line]
    print("         ", " ".join(summary[-1:]).strip(), flush=True)
    require(done.returncode == 0, f"schemathesis ended with {done.returncode}")


def by_our_description() -> None:
    excluded = ",".join(OWN_EXCLUDED)
    schemathesis(
        f"{SERVER.url}/openapi.json", f"--url={SERVER.url}", f"--exclude-checks={excluded}"
    )


def by_openais_description() -> None:
    path = str(DATA / "openai_api.json")
    schemathesis(path, f"--url={SERVER.base_url}", f"--checks={','.join(OPENAI_CHECKS)}")


run_checks({f.__name__: f for f in (by_our_description, by_openais_description)})
