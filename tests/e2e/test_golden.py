"""The real model says what transformers says: ids, logprobs, text; with room to spare and with
almost none.
"""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.llm import LLM
from jaxserve.request import SamplingParams
from tests.llms import shared_llm
from tests.model.test_llama import full_forward
from tests.numpy_llama import log_softmax

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

ROOMY_REQUESTS = {"w1": 16, "w2": 1, "w3": 8}
TIGHT_REQUESTS = {"w1": 8, "w2": 1, "w3": 3}
GOLDEN = Path(__file__).parent.parent / "golden"
WORKLOADS = Path(__file__).parent.parent.parent / "scripts" / "workloads"
NEAR_TIE = 5e-4  # a gap between the two largest logits below which rounding may decide

ROOMY = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "max_model_len": 1024,
    "num_pages": 256,
    "token_buckets": (1, 8, 32, 256),
    "row_buckets": (1, 8, 32),
}
# 16 tokens a step, and pages for little more than the longest request: w1 is preempted again and
# again.
TIGHT = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 16,
    "max_model_len": 1024,
    "page_size": 16,
    "num_pages": 64,
    "token_buckets": (1, 4, 16),
    "row_buckets": (1, 4, 16),
}


@functools.cache
def golden_cases() -> list[dict]:
    return json.loads((GOLDEN / "smol_f32.json").read_text())["cases"]


def requests(workload: str) -> list[dict]:
    return [json.loads(x) for x in (WORKLOADS / f"{workload}.jsonl").read_text().splitlines()]


def run(llm: LLM, prompts: list[list[int]], sizes: list[int], *, ignore_eos: bool) -> list:
    params = [
        SamplingParams(max_tokens=n, temperature=0, ignore_eos=ignore_eos, logprobs=True)
        for n in sizes
    ]
    return [output.outputs[0] for output in llm.generate(prompts, params)]


def assert_same(output, reference: dict, prompt: list[int], model: Path) -> None:
    """The rule of tests/golden/README.md."""
    ids, logprobs = reference["output_ids"], reference["logprobs"]
    near = [i for i, gap in enumerate(reference["margins"]) if gap < NEAR_TIE]
    same = next(
        (i for i, (a, b) in enumerate(zip(output.token_ids, ids, strict=False)) if a != b), len(ids)
    )
    if same == len(ids):
        assert output.token_ids == ids
    else:
        assert near, f"id {same} differs without a near-tie"
        assert same >= near[0], f"id {same} differs before the first near-tie at {near[0]}"
        rows = log_softmax(full_forward(model, [*prompt, *ids])[len(prompt) - 1 : -1])
        forced = rows[np.arange(len(ids)), ids]
        assert np.abs(forced - logprobs).max() < 1e-3
    assert np.abs(np.subtract(output.logprobs[:same], logprobs[:same])).max(initial=0) < 1e-3


def test_golden_prompts(real_model_directory):
    llm = shared_llm(real_model_directory, **ROOMY)
    cases = golden_cases()
    for case in cases:
        if case["kind"] == "raw":
            assert llm.encode(case["prompt"]) == case["prompt_ids"]
    outputs = run(
        llm,
        [c["prompt_ids"] for c in cases],
        [len(c["output_ids"]) for c in cases],
        ignore_eos=False,
    )
    for case, output in zip(cases, outputs, strict=True):
        assert output.token_ids == case["output_ids"]
        assert np.abs(np.subtract(output.logprobs, case["logprobs"])).max() < 1e-3
        assert output.text == case["output_text"].removesuffix("<|im_end|>")
        ended = case["output_ids"][-1] == 2
        assert output.finish_reason == ("stop" if ended else "length")


@pytest.mark.parametrize("arm", ["roomy", "tight"])
@pytest.mark.parametrize("workload", ["w1", "w2", "w3"])
def test_workloads(real_model_directory, workload, arm):
    llm = shared_llm(real_model_directory, **(ROOMY if arm == "roomy" else TIGHT))
    before = llm.engine.stats().num_preemptions
    lines = requests(workload)[: (ROOMY_REQUESTS if arm == "roomy" else TIGHT_REQUESTS)[workload]]
    outputs = run(
        llm,
        [line["prompt_token_ids"] for line in lines],
        [line["max_tokens"] for line in lines],
        ignore_eos=True,
    )
    references = json.loads((GOLDEN / "workload_outputs_f32.json").read_text())[workload]
    for line, output, reference in zip(lines, outputs, references, strict=False):
        assert reference["id"] == line["id"]
        assert_same(output, reference, line["prompt_token_ids"], real_model_directory)
    if arm == "tight" and workload == "w1":
        assert llm.engine.stats().num_preemptions > before
    llm.engine.check_invariants()
