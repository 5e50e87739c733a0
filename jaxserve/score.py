"""`Score`: how likely given tokens are, and the requests that find it out. Called by `LLM.score`.

Such a request asks for no tokens: its prompt is computed from the first token that is scored on, or
from the end of what the prefix cache has before it, and nothing is sampled that anybody sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError, NonFiniteError, shown
from jaxserve.field_checks import is_int, plain
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=0, prompt_logprobs=0)


@dataclass(frozen=True, kw_only=True)
class Score:
    """How likely the tokens of a prompt are, each after those before it.

    Args:
        token_ids: of the whole prompt.
        start: the first position that was asked for.
        logprobs: natural logs in f32 of the tokens from `start` on; None for position 0, which has
            nothing before it. At least -9999 each.
        ranks: the place of each among all tokens, 1 = none is likelier; None as above.
        total: the sum of the logprobs; 0.0 where none is scored.
        num_cached_tokens: tokens before the first one scored that the prefix cache had.
    """

    token_ids: list[int]
    start: int
    logprobs: list[float | None]
    ranks: list[int | None]
    total: float
    num_cached_tokens: int

    @property
    def is_greedy(self) -> bool:
        """Whether no scored token had a likelier one in its place: greedy decoding says the same."""
        return all(rank in (None, 1) for rank in self.ranks)


def starts_of(start: object, num_prompts: int) -> list[int]:
    """One start for each prompt.

    Raises:
        InvalidRequestError: neither an integer >= 0 nor one for each prompt.
    """
    several = list(start) if isinstance(start, list | tuple) else [start] * num_prompts
    several = [plain(one) for one in several]
    for one in several:
        if not is_int(one) or one < 0:
            raise InvalidRequestError(
                f"start must be an integer >= 0, or one per prompt, got {shown(one)}", param="start"
            )
    if len(several) != num_prompts:
        raise InvalidRequestError(
            f"start must be one, or one per prompt: got {len(several)} for {num_prompts}",
            param="start",
        )
    return several


def score_request(request_id: str, token_ids: Sequence[int], start: int) -> Request:
    """The request that scores a prompt from a position on.

    Raises:
        InvalidRequestError: there is no such position.
    """
    if start and start >= len(token_ids):
        raise InvalidRequestError(
            f"start must be below the length of its prompt ({len(token_ids)}), got {start}",
            param="start",
        )
    return Request(
        id=request_id,
        prompt_token_ids=token_ids,
        sampling_params=PARAMS,
        prompt_logprobs_start=start,
    )


def score_of(request: Request, output: RequestOutput) -> Score:
    """What a request of `score_request` found.

    Raises:
        NonFiniteError: the model computed something that is no finite number.
    """
    if output.prompt_logprobs is None:
        raise NonFiniteError(
            "the model's hidden states or logits are NaN or infinite for a scored prompt",
            code=str(output.outputs[0].stop_reason),
        )
    start = request.prompt_logprobs_start
    scored = output.prompt_logprobs[start:]
    return Score(
        token_ids=list(request.prompt_token_ids),
        start=start,
        logprobs=[None if one is None else one.logprob for one in scored],
        ranks=[None if one is None else one.rank for one in scored],
        total=sum(one.logprob for one in scored if one is not None) + 0.0,
        num_cached_tokens=output.num_cached_tokens,
    )
