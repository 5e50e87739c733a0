"""One of several processes of an engine: `python -m tests.multihost.one_process MODEL ADDRESS COUNT ID WHAT`.

Process 0 prints JSON lines; WHAT says what becomes of it. COUNT 1 makes the same alone.
"""

import json
import os
import sys

import numpy as np

from jaxserve.errors import JaxserveError, ProcessLostError
from jaxserve.follower import follow_leader
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams

OPTIONS: dict = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "token_buckets": (8,),
    "row_buckets": (4,),
    "max_model_len": 64,
    "page_size": 8,
}
PROMPTS = [[5 + i, 6, 7, 8 + i] * (2 + i % 3) for i in range(6)]


def params_of(i: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=8,
        temperature=0.9 if i % 2 else 0.0,
        seed=i,
        ignore_eos=True,
        logprobs=1,
        presence_penalty=0.5 if i == 3 else 0.0,
        allowed_token_ids=[3, 4, 5, 6] if i == 4 else None,
        prompt_logprobs=1 if i == 5 else None,
        n=2 if i == 2 else 1,
    )


def say(**found: object) -> None:
    print(json.dumps(found), flush=True)


def outputs_of(llm: LLM) -> list[list[list[int]]]:
    found = llm.generate(PROMPTS, [params_of(i) for i in range(len(PROMPTS))])
    return [[one.token_ids for one in output.outputs] for output in found]


def lead(model: str, what: str, options: dict) -> None:
    llm = LLM(model, **OPTIONS, **options)
    say(first=outputs_of(llm))
    engine = llm.engine
    if what == "killed":
        os._exit(3)
    if what == "waits":
        say(waits=True)
        sys.stdin.readline()
        try:
            outputs_of(llm)
        except ProcessLostError as error:
            say(error=str(error))
        os._exit(0)
    executor = getattr(engine.executor, "_executor", engine.executor)
    shapes = executor._shapes.model.given_params  # type: ignore[attr-defined]
    draws = np.random.default_rng(7)
    import jax

    others = jax.tree.map(
        lambda leaf: draws.normal(scale=0.3, size=leaf.shape).astype(leaf.dtype), shapes
    )
    engine.update_params(others)
    say(after=outputs_of(llm))
    engine.sleep()
    engine.wake()
    say(woken=outputs_of(llm), num_preemptions=engine.stats().num_preemptions)
    say(devices=len(jax.devices()))
    llm.close()


def ended(reason: str) -> None:
    print(reason, file=sys.stderr, flush=True)
    os._exit(5)


def main() -> None:
    model, address, count, process_id, what = sys.argv[1:]
    options: dict = {"num_pages": 6, "host_kv_gib": 0.001}
    if int(count) > 1:
        options |= {
            "coordinator_address": address,
            "num_processes": int(count),
            "process_id": int(process_id),
            "tensor_parallel_size": 2 * int(count),
        }
    if what == "differs" and process_id == "1":
        options["seed"] = 7
    try:
        if process_id == "0":
            lead(model, what, options)
        else:
            follow_leader(model, on_lost=ended, **OPTIONS, **options)
    except JaxserveError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(4)


if __name__ == "__main__":
    main()
