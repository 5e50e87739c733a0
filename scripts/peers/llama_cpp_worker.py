"""llama.cpp's server as a worker of `scripts/bench_peers`; see protocol.py.

Run by any Python, as a module, with the checkout as the working directory. It starts the server, sends
each request over a connection of its own and ends the server when stdin ends.
"""

import argparse
import functools
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from scripts.peers.protocol import Outcome, Prompt, claim_stdout, serve

HOST = "127.0.0.1"
NUM_SLOTS = 32
CONTEXT = 32768  # of all slots together
LOAD_TIMEOUT_S = 120
REQUEST_TIMEOUT_S = 600


def start_server(program: str, model: str, num_threads: int, port: int) -> subprocess.Popen:
    """The server, which loads while this returns."""
    flags = {
        "--model": model,
        "--host": HOST,
        "--port": port,
        "-t": num_threads,
        "-tb": num_threads,
        "-np": NUM_SLOTS,
        "-c": CONTEXT,
        "-b": 2048,
        "-ub": 512,
        "--cache-ram": 0,
    }
    pairs = [str(part) for pair in flags.items() for part in pair]
    return subprocess.Popen([program, *pairs, "--no-kv-unified", "--no-webui"], stdout=sys.stderr)


def wait_until_ready(server: subprocess.Popen, port: int) -> None:
    """Returns when the server has loaded; raises where it ended or takes too long."""
    deadline = time.monotonic() + LOAD_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with status {server.returncode}")
        connection = http.client.HTTPConnection(HOST, port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass  # it does not listen yet
        finally:
            connection.close()
        time.sleep(0.05)
    raise RuntimeError(f"llama-server was not ready after {LOAD_TIMEOUT_S} s")


def complete(port: int, begin: float, barrier: threading.Barrier, prompt: Prompt) -> tuple:
    """(ids, seconds from `begin` to the first of them) of one request, read as they come."""
    body = {
        "prompt": prompt.token_ids,
        "n_predict": prompt.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_TIMEOUT_S)
    ids: list[int] = []
    first_s = 0.0
    barrier.wait()
    try:
        connection.request(
            "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"llama-server: status {response.status}: {response.read()[:300]!r}")
        for line in response:
            if line.startswith(b"data: "):
                tokens = json.loads(line[len(b"data: ") :]).get("tokens", [])
                if tokens and not ids:
                    first_s = time.perf_counter() - begin
                ids.extend(tokens)
    finally:
        connection.close()
    return ids, first_s


def generate(port: int, prompts: list[Prompt], prefix_caching: bool) -> Outcome:
    """Sends all requests at once."""
    if prefix_caching:
        raise ValueError("prefix_caching: a slot of llama.cpp keeps what an earlier run computed")
    barrier = threading.Barrier(len(prompts) + 1)
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = [pool.submit(complete, port, begin, barrier, prompt) for prompt in prompts]
        barrier.wait()
        results = [future.result() for future in futures]
    wall_s = time.perf_counter() - begin
    return Outcome(wall_s, [ids for ids, _ in results], [first_s for _, first_s in results])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


def main() -> None:
    replies = claim_stdout()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", required=True, help="the llama-server program")
    parser.add_argument("--version", required=True, help="of its source, for the record")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--num_threads", required=True, type=int)
    given = parser.parse_args()
    port = free_port()
    server = start_server(given.server, given.model, given.num_threads, port)
    try:
        wait_until_ready(server, port)
        serve(replies, {"llama.cpp": given.version}, functools.partial(generate, port))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
