"""transformers as a worker of `scripts/bench_peers`, see protocol.py: `generate` with one static batch.

Run by the Python of transformers' own environment, as a module, with the checkout as the working
directory. All requests are padded on the left to the longest prompt and run until the longest output is
done, as static batching does; each request keeps only the tokens that it asked for.
"""

import argparse
import functools
import time

import torch
import transformers

from scripts.peers.protocol import Outcome, Prompt, claim_stdout, serve

PADDING_ID = 0  # masked, so any id does


class FirstTokenClock(transformers.StoppingCriteria):
    """Never stops anything; notes when it was asked first, which is after the first token of all rows."""

    def __init__(self) -> None:
        self.time_s: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        if self.time_s is None:
            self.time_s = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def make_batch(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Ids and mask, each i64[requests, longest prompt], padded on the left."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    ids = [[PADDING_ID] * n + prompt for n, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * n + [1] * (longest - n) for n in padding]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def generate(model, prompts: list[Prompt], prefix_caching: bool) -> Outcome:
    """Greedy ids behind each prompt; there is no prefix cache to use."""
    if prefix_caching:
        raise ValueError("prefix_caching: generate has no prefix cache")
    num_tokens = max(prompt.max_tokens for prompt in prompts)
    clock = FirstTokenClock()
    begin = time.perf_counter()
    batch = make_batch([prompt.token_ids for prompt in prompts])
    with torch.inference_mode():
        rows = model.generate(
            **batch,
            max_new_tokens=num_tokens,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
    outputs = rows[:, batch["input_ids"].shape[1] :].tolist()
    wall_s = time.perf_counter() - begin
    assert clock.time_s is not None
    assert all(len(row) == num_tokens for row in outputs), "a row stopped early"
    token_ids = [row[: prompt.max_tokens] for row, prompt in zip(outputs, prompts, strict=True)]
    return Outcome(wall_s, token_ids, [clock.time_s - begin] * len(prompts))


def main() -> None:
    replies = claim_stdout()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--num_threads", required=True, type=int)
    given = parser.parse_args()
    torch.set_num_threads(given.num_threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        given.model, dtype=torch.float32, local_files_only=True
    )
    # A whole config of our own: without an end id nothing stops early, and no logit is suppressed for it.
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, pad_token_id=PADDING_ID
    )
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    serve(replies, versions, functools.partial(generate, model))


if __name__ == "__main__":
    main()
