"""What callers give `LLM`, in its many shapes, as one: prompts, conversations, sampling params.

Every function raises InvalidRequestError with the argument at fault.
"""

from collections.abc import Sequence
from numbers import Integral

from jaxserve.errors import InvalidRequestError, shown
from jaxserve.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Message = dict[str, object]
Tool = dict[str, object]


def as_prompts(prompts: object) -> list[Prompt]:
    """One prompt or many, as a list.

    Raises:
        InvalidRequestError: neither; names the element at fault.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not _is_sequence(prompts):
        raise InvalidRequestError(
            "prompts must be a text, a list of token ids, or a list of these, "
            f"got {shown(prompts)}",
            param="prompt",
        )
    several = list(prompts)  # type: ignore[call-overload]
    if several and isinstance(several[0], Integral):
        return [several]  # the ids of one prompt; the engine checks them one by one
    for number, one in enumerate(several):
        if not isinstance(one, str) and not _is_sequence(one):
            raise InvalidRequestError(
                f"prompts[{number}] must be a text or a list of token ids, got {shown(one)}",
                param="prompt",
            )
    return several


def as_conversations(messages: object) -> list[Sequence[Message]]:
    """One conversation or several, as a list; what is in them is checked by the template."""
    if not isinstance(messages, list | tuple):
        raise InvalidRequestError(
            f"messages must be a list of messages, got {shown(messages)}", param="messages"
        )
    several = bool(messages) and all(isinstance(m, list | tuple) for m in messages)
    return list(messages) if several else [messages]


def _is_sequence(value: object) -> bool:
    """A list or tuple, or an array of at least one dimension."""
    return isinstance(value, list | tuple) or bool(getattr(value, "ndim", 0))


def one_per_prompt(
    params: object, num_prompts: int, default: SamplingParams
) -> list[SamplingParams]:
    """Sampling params for each prompt; `default` where none are given."""
    if params is None or isinstance(params, SamplingParams):
        return [default if params is None else params] * num_prompts
    if not isinstance(params, list | tuple) or not all(
        isinstance(one, SamplingParams) for one in params
    ):
        raise InvalidRequestError(
            f"sampling_params must be SamplingParams, or a list of them, got {shown(params)}",
            param="sampling_params",
        )
    if len(params) != num_prompts:
        raise InvalidRequestError(
            f"sampling_params must be one, or one per prompt: got {len(params)} for {num_prompts}",
            param="sampling_params",
        )
    return list(params)
