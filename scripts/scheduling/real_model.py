"""The figures of scheduling_figures that a real model on this machine has to show, each a ratio of two arms
that take turns in one process, with the same tokens in both.

Called by scripts/scheduling_figures. Every function returns what was measured; nothing is asserted but
the tokens.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from jaxserve.cli.flags import COMPILATION_CACHE_DIR
from jaxserve.llm import LLM
from jaxserve.pages.kv_manager import KVManager
from jaxserve.pages.page_table import PageTable
from jaxserve.request import Request
from jaxserve.sampling_params import BeamParams, SamplingParams
from jaxserve.schedule.preemption import PreemptionMode

WORKLOADS = Path(__file__).resolve().parent.parent / "workloads"
BEAM_WIDTH = 6
NUM_PRESSED = 16  # requests for which there are too few pages
PRESSED_PROMPT, PRESSED_OUTPUT = 32, 112  # tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """Two arms that took turns.

    Args:
        first_s, second_s: seconds of each repetition.
        same_tokens: whether both gave the same.
        notes: counters worth showing.
    """

    first_s: list[float]
    second_s: list[float]
    same_tokens: bool
    notes: dict[str, object]

    @property
    def ratio(self) -> float:
        """Median of the first over median of the second."""
        return statistics.median(self.first_s) / statistics.median(self.second_s)


def prefix_cache(model: str, repeats: int) -> Turns:
    """w3 (sixteen requests that share 512 tokens) without the cache, then with an empty one."""
    arms = [_small_llm(model, enable_prefix_caching=on) for on in (False, True)]
    requests = _workload("w3")
    turns = _take_turns([lambda llm=llm: _run(llm, requests) for llm in arms], repeats)
    counters = arms[1].engine.scheduler.counters
    hit_rate = counters.num_hit_tokens / counters.num_queried_tokens
    return dataclasses.replace(turns, notes={"token_hit_rate": hit_rate})


def preemption(model: str, repeats: int, share: float = 0.3) -> Turns:
    """Short beginnings of w1's prompts with long answers, in pages for a part of what they come to
    need at once: preemption_mode auto, then recompute.
    """
    requests = [
        {"prompt_token_ids": r["prompt_token_ids"][:PRESSED_PROMPT], "max_tokens": PRESSED_OUTPUT}
        for r in _workload("w1")[:NUM_PRESSED]
    ]
    page_size = 16
    demand = sum(-(-(len(r["prompt_token_ids"]) + r["max_tokens"]) // page_size) for r in requests)
    llm = _small_llm(
        model,
        num_pages=1 + int(share * demand),
        page_size=page_size,
        host_kv_gib=1.0,
        preemption_mode="auto",
    )
    expected = _run(_small_llm(model), requests)
    costs = llm.engine.executor.costs
    scheduler = llm.engine.scheduler
    outputs = []

    def arm(mode: str) -> Callable[[], object]:
        def run() -> object:
            scheduler.preemption = PreemptionMode(mode, costs)
            outputs.append(_run(llm, requests))
            return outputs[-1]

        return run

    outputs.append(arm("swap")())
    turns = _take_turns([arm("auto"), arm("recompute")], repeats)
    counters = scheduler.counters
    notes = {
        "num_preemptions": counters.num_preemptions,
        "num_swaps": counters.num_swaps,
        "num_recomputes": counters.num_recomputes,
        "token_ms": 1e3 * costs.token_s,
        "page_move_ms": 1e3 * costs.page_move_s,
    }
    same = all(one == expected for one in outputs)
    return dataclasses.replace(turns, same_tokens=same, notes=notes)


class CopyingKVManager(KVManager):
    """Gives every fork copies of all its pages: what sharing them is compared with."""

    def fork(self, table: PageTable, num_tokens: int) -> PageTable:
        """A table with pages of its own, which the next step fills from the other's."""
        child = self.new_table()
        num_pages = min(len(table), -(-num_tokens // self.page_size))
        page_ids = self.pool.alloc(num_pages)
        if page_ids is None:
            raise RuntimeError("the pool is too small to copy everything")
        sources = table.row[:num_pages].tolist()
        self.pool.share(sources)
        self._read_by_copies.update(sources)
        self._copies.extend(zip(sources, page_ids, strict=True))
        child.append(page_ids)
        return child


def beams(model: str) -> dict[str, object]:
    """Page-steps of a beam search that shares pages over one that copies everything."""
    prompts = [r["prompt_token_ids"][:64] for r in _workload("w1")[:4]]
    params = BeamParams(beam_width=BEAM_WIDTH, max_tokens=64, ignore_eos=True)
    page_steps = []
    found = []
    for manager in (KVManager, CopyingKVManager):
        llm = _small_llm(model, page_size=16, num_pages=1200, enable_prefix_caching=False)
        kv = llm.engine.scheduler.kv
        kv.__class__ = manager
        total = 0
        for number, prompt in enumerate(prompts):
            llm.engine.add(Request(id=str(number), prompt_token_ids=prompt, beam=params))
        best = {}
        while llm.engine.has_work():
            for output in llm.engine.step():
                best[output.request_id] = [one.token_ids for one in output.outputs]
            total += kv.num_owned_pages
        page_steps.append(total)
        found.append(best)
    return {"saved": 1 - page_steps[0] / page_steps[1], "same_beams": found[0] == found[1]}


def _small_llm(model: str, **options: object) -> LLM:
    return LLM(model, max_model_len=1024, compilation_cache_dir=COMPILATION_CACHE_DIR, **options)


def _workload(name: str) -> list[dict]:
    lines = (WORKLOADS / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _run(llm: LLM, requests: list[dict]) -> list[list[int]]:
    """The tokens of every request, all of them added at once to an engine with an empty cache."""
    llm.engine.scheduler.kv.clear_cache()
    params = [
        SamplingParams(max_tokens=r["max_tokens"], temperature=0, ignore_eos=True) for r in requests
    ]
    outputs = llm.generate([r["prompt_token_ids"] for r in requests], params)
    return [output.outputs[0].token_ids for output in outputs]


def _take_turns(arms: list[Callable[[], object]], repeats: int) -> Turns:
    seconds: list[list[float]] = [[], []]
    results = []
    for _ in range(repeats):
        for arm, times in zip(arms, seconds, strict=True):
            begin = time.monotonic()
            results.append(arm())
            times.append(time.monotonic() - begin)
    same = all(one == results[0] for one in results)
    return Turns(first_s=seconds[0], second_s=seconds[1], same_tokens=same, notes={})
