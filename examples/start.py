"""The first steps: a text from a model, several at once, and one as it comes.

    python examples/start.py [MODEL]

MODEL is a checkpoint directory, a GGUF file, or a name that `jaxserve fetch` made.
"""

import sys

from jaxserve import LLM, SamplingParams


def main(model: str = "smollm2-135m-instruct") -> None:
    """Loads the model, which compiles for a while, and generates."""
    # Small limits: fewer shapes to compile at the start.
    llm = LLM(model, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=256)
    greedy = SamplingParams(max_tokens=24, temperature=0)

    prompts = ["The capital of France is", "Once upon a time"]
    for prompt, output in zip(prompts, llm.generate(prompts, greedy), strict=True):
        print(f"{prompt!r} -> {output.outputs[0].text!r}")

    several = SamplingParams(max_tokens=8, temperature=1.0, seed=7, n=2)
    for choice in llm.generate("Colours of the rainbow:", several)[0].outputs:
        print(f"choice {choice.index}: {choice.text!r} ({choice.finish_reason})")

    for part in llm.stream("In the beginning", greedy):
        print(part.outputs[0].text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:2])
