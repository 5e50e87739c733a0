"""Engines shared between tests: one per checkpoint and options, so that each is compiled once in a run."""

import functools
from collections.abc import Sequence
from pathlib import Path

from jaxserve.llm import LLM
from jaxserve.request import RequestOutput, SamplingParams

TINY = Path(__file__).parent.parent / "checkpoints" / "tiny_llama"

# Two rungs of tokens and one of rows, of the limits of `shared_llm`: a third of the programs, and what it has
# unless its limits or its ladders are named.
FEW_BUCKETS = {"token_buckets": (4, 32), "row_buckets": (4,)}
WHOLE_LADDERS = {"token_buckets": None, "row_buckets": None}  # for whoever tests the ladders


def shared_llm(model: str | Path = TINY, **options: object) -> LLM:
    """An idle `LLM` with FEW_BUCKETS, unless its limits or ladders are given; the caller leaves it idle."""
    small: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 128,
    }
    if not {"max_num_seqs", "max_num_batched_tokens", *FEW_BUCKETS} & options.keys():
        small |= FEW_BUCKETS
    if "num_pages" not in options:
        small["kv_cache_gib"] = 0.01
    return _made(str(model), **dict(sorted((small | options).items())))


# A compiled program takes dozens of memory mappings, or hundreds, and a process may have 65,530 of them:
# what was not used for long makes room. Programs stay in the compilation cache of the run.
@functools.lru_cache(maxsize=10)
def _made(model: str, **options: object) -> LLM:
    return LLM(model, **options)


def greedy(num_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(
        max_tokens=num_tokens, temperature=0, **({"ignore_eos": True, "logprobs": True} | fields)
    )  # type: ignore[arg-type]


def stream_all(
    llm: LLM, prompt: str | Sequence[int], params: SamplingParams
) -> list[RequestOutput]:
    """What each step released."""
    return list(llm.stream(prompt, params))
