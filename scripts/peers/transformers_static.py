"""The transformers arm of a comparison: `generate` with one static batch, once for each line on stdin.

Started by scripts/bench_transformers with the Python of the peer's own environment (torch and
transformers; nothing of this project). All requests are padded on the left to the longest prompt and
run until the longest output is done, as static batching does; each request keeps only the tokens that
it asked for. Protocol as in jaxserve_offline.py.
Invariant: between two lines it waits and computes nothing.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import transformers

PADDING_ID = 0  # masked, so any id does


def make_batch(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Ids and mask, each i64[requests, longest prompt], padded on the left."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    ids = [[PADDING_ID] * n + prompt for n, prompt in zip(padding, prompts)]  # noqa: B905
    mask = [[0] * n + [1] * (longest - n) for n in padding]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def generate(model, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy ids behind each prompt, `num_tokens` of them in every row."""
    batch = make_batch(prompts)
    with torch.inference_mode():
        rows = model.generate(**batch, max_new_tokens=num_tokens)
    outputs = rows[:, batch["input_ids"].shape[1] :].tolist()
    assert all(len(row) == num_tokens for row in outputs), "a row stopped early"
    return outputs


def main() -> None:
    replies, sys.stdout = (
        sys.stdout,
        sys.stderr,
    )  # whatever else is printed must not look like a reply
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True, type=Path)
    parser.add_argument("--num_threads", required=True, type=int)
    given = parser.parse_args()
    torch.set_num_threads(given.num_threads)
    requests = [json.loads(line) for line in given.workload.read_text("utf-8").splitlines()]
    prompts = [one["prompt_token_ids"] for one in requests]
    asked = [one["max_tokens"] for one in requests]

    model = transformers.AutoModelForCausalLM.from_pretrained(
        given.model, dtype=torch.float32, local_files_only=True
    )
    # A whole config of our own: without an end id nothing stops early, and no logit is suppressed for it.
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, pad_token_id=PADDING_ID
    )
    generate(model, prompts, 2)  # first calls of kernels and allocators, as jaxserve's warm-up
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps({"versions": versions}), file=replies, flush=True)
    for _ in sys.stdin:
        begin, cpu_s = time.perf_counter(), time.process_time()
        outputs = generate(model, prompts, max(asked))
        wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_s
        token_ids = [row[:count] for row, count in zip(outputs, asked)]  # noqa: B905
        reply = {"wall_s": wall_s, "cpu_s": cpu_s, "token_ids": token_ids, "notes": {}}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
