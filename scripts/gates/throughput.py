"""Gate: through HTTP, workload w1 takes at most a tenth longer than in the engine alone.

Both arms are loaded once and take turns, as in `scripts/bench_peers`: while one runs the other waits. A
ratio is made of two runs that followed each other.
"""

import asyncio
import secrets
import statistics
import sys
from pathlib import Path

from jaxserve.server.load.client import LoadClient, Target
from jaxserve.server.load.datasets import file_requests
from jaxserve.server.load.run_load import run_load
from scripts.gates.checks import Check, Options
from scripts.gates.server import ROOT, GateError, Server
from scripts.outside import PeerError
from scripts.peers.arm import Arm

WORKLOAD = ROOT / "scripts" / "workloads" / "w1.jsonl"
LEAST = 0.9
_FLAGS = ("--dtype=float32",)


def run(options: Options) -> list[Check]:
    """Runs it."""
    command = [sys.executable, "-m", "scripts.peers.jaxserve_worker", f"--model={options.model}"]
    log = options.folder / "throughput_offline.log"
    try:
        with (
            Arm("offline", [*command, *_FLAGS], log=log) as offline,
            Server(options.model, *_FLAGS, log=options.folder / "throughput.log") as server,
        ):
            offline.wait_until_ready()
            offline.ask(workload=str(WORKLOAD), prefix_caching=True, max_tokens=2)
            asyncio.run(_serve(server))  # a first run on each side does not count
            runs = [_turn(offline, server) for _ in range(options.repetitions)]
    except PeerError as error:
        raise GateError(str(error)) from None
    ratios = [one / other for one, other in runs]
    found = statistics.median(ratios)
    walls = ", ".join(f"{one:.2f} / {other:.2f}" for one, other in runs)
    return [
        Check(
            gate="throughput",
            what=f"w1 on {Path(options.model).name}: server against offline",
            found=f"{found:.3f} ({min(ratios):.3f} to {max(ratios):.3f}; offline / server, s: {walls})",
            wanted=f">= {LEAST}",
            passed=found >= LEAST,
        )
    ]


def _turn(offline: Arm, server: Server) -> tuple[float, float]:
    """(seconds offline, seconds through HTTP) of the workload."""
    reply = offline.measure(WORKLOAD, prefix_caching=True)
    wall_s = asyncio.run(_serve(server))
    print(f"w1: offline {reply['wall_s']:.2f} s, server {wall_s:.2f} s", file=sys.stderr)
    return reply["wall_s"], wall_s


async def _serve(server: Server) -> float:
    """Seconds from sending all requests at once to the last token."""
    salt = secrets.token_hex(8)  # nothing is found that an earlier run left
    client = LoadClient(Target(base_url=server.url, cache_salt=salt))
    await client.find_model()
    requests = file_requests(WORKLOAD.read_bytes().splitlines(), is_chat=False)
    load = await run_load(client.send, requests, [0.0] * len(requests), deadline_s=600)
    await client.close()
    for record, request in zip(load.records, requests, strict=True):
        if not record.is_good or record.num_output_tokens != request.body["max_tokens"]:
            raise GateError(f"request {record.index} of w1: {record.failure}: {record.detail}")
    return load.duration_s
