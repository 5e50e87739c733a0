"""The engine's log-probabilities beside those of `PlainForward`, in the ways that an engine comes by them.

Used by `scripts/parity_report`. Every token that the engine samples or scores is compared with a
teacher-forced pass over the same ids: what the engine sampled is the text that the plain pass is given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.device.calibration_text import calibration_ids
from jaxserve.llm import LLM
from jaxserve.request import RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.tokenizer import Tokenizer
from scripts.parity.plain_forward import PlainForward


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of getting log-probabilities.

    Args:
        name: what it is.
        num_tokens: how many were compared.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        max_delta, mean_delta: of |engine - plain forward|, natural log.
    """

    name: str
    num_tokens: int
    num_cached_tokens: int
    max_delta: float
    mean_delta: float

    @classmethod
    def of(cls, name: str, deltas: Sequence[float], num_cached_tokens: int) -> "Row":
        """NaN anywhere shows in both figures."""
        found = np.abs(np.asarray(deltas, np.float64))
        return cls(
            name=name,
            num_tokens=len(found),
            num_cached_tokens=num_cached_tokens,
            max_delta=float(found.max()),
            mean_delta=float(found.mean()),
        )


def make_prompts(
    vocab_size: int, tokenizer: Tokenizer | None, num_prompts: int, num_tokens: int
) -> list[list[int]]:
    """Prompts of different lengths; every second one begins with half of the one before it.

    Args:
        vocab_size: ids below it are tokens.
        tokenizer: the model's; without one ids are drawn.
        num_prompts: how many.
        num_tokens: of the longest.
    """
    ids = calibration_ids(tokenizer, vocab_size=vocab_size, max_position_embeddings=2**16)
    rng = np.random.default_rng(0)
    prompts: list[list[int]] = []
    for number in range(num_prompts):
        length = max(2, num_tokens - number % 7)
        begin = int(rng.integers(0, len(ids)))
        prompt = [ids[(begin + i) % len(ids)] for i in range(length)]
        if number % 2:
            shared = length // 2
            prompt[:shared] = prompts[-1][:shared]
        prompts.append(prompt)
    return prompts


def compare(
    llm: LLM, plain: PlainForward, prompts: list[list[int]], max_tokens: int
) -> Iterator[Row]:
    """Every row of the report, as it comes.

    Args:
        llm: its cache is empty, and its pool holds all of it.
        plain: of the same params.
        prompts: token ids.
        max_tokens: tokens to sample for each.
    """
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=1, seed=i, ignore_eos=True, logprobs=0)
        for i in range(len(prompts))
    ]
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    cold = llm.generate(prompts, params)
    yield _sampled("sampled", cold, prompts, plain)
    warm = llm.generate(prompts, params)
    yield _sampled("sampled after a prefix hit", warm, prompts, plain)
    texts = [p + o.outputs[0].token_ids for p, o in zip(prompts, cold, strict=True)]
    known = [plain(text).tolist() for text in texts]
    whole = llm.generate(texts, scored)
    deltas: list[float] = []
    for output, want in zip(whole, known, strict=True):
        assert output.prompt_logprobs is not None
        pairs = zip(output.prompt_logprobs[1:], want[1:], strict=True)
        deltas += [one.logprob - x for one, x in pairs if one is not None]
    yield Row.of("scored, whole", deltas, sum(o.num_cached_tokens for o in whole))
    starts = [len(prompt) for prompt in prompts]
    scores = llm.score(texts, start=starts)
    deltas = []
    for score, want, start in zip(scores, known, starts, strict=True):
        pairs = zip(score.logprobs, want[start:], strict=True)
        deltas += [got - x for got, x in pairs if got is not None]
    yield Row.of("scored after a prefix hit", deltas, sum(one.num_cached_tokens for one in scores))


def _sampled(
    name: str, outputs: list[RequestOutput], prompts: list[list[int]], plain: PlainForward
) -> Row:
    deltas: list[float] = []
    for output, prompt in zip(outputs, prompts, strict=True):
        (one,) = output.outputs
        assert one.logprobs is not None
        want = plain([*prompt, *one.token_ids])[len(prompt) :].tolist()
        deltas += [got - x for got, x in zip(one.logprobs, want, strict=True)]
    return Row.of(name, deltas, sum(output.num_cached_tokens for output in outputs))
