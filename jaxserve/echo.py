"""`echo`: outputs that begin with their prompt. Called by the faces; the engine knows nothing of it.

Logprobs stay those of the output tokens alone, and so do the counts: the prompt's own are
`prompt_logprobs`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from jaxserve.request import CompletionOutput, RequestOutput


def with_prompt(
    output: RequestOutput, prompt_token_ids: Sequence[int], prompt_text: str
) -> RequestOutput:
    """An output whose choices all begin with the prompt; a new one."""
    outputs = [_begun(one, prompt_token_ids, prompt_text) for one in output.outputs]
    return replace(output, outputs=outputs)


def with_prompts_first(
    parts: Iterable[RequestOutput], prompt_token_ids: Sequence[int], prompt_text: str
) -> Iterator[RequestOutput]:
    """The parts of a stream, in which the first piece of each choice begins with the prompt."""
    first = PromptFirst(prompt_token_ids, prompt_text)
    for part in parts:
        yield first(part)


class PromptFirst:
    """The same part by part, for one stream: a call gives each part as it is shown.

    Args:
        prompt_token_ids, prompt_text: the prompt.
    """

    def __init__(self, prompt_token_ids: Sequence[int], prompt_text: str):
        self._prompt = (prompt_token_ids, prompt_text)
        self._begun: set[int] = set()

    def __call__(self, part: RequestOutput) -> RequestOutput:
        outputs = [
            one if one.index in self._begun else _begun(one, *self._prompt) for one in part.outputs
        ]
        self._begun |= {one.index for one in outputs}
        return replace(part, outputs=outputs)


def _begun(
    completion: CompletionOutput, prompt_token_ids: Sequence[int], prompt_text: str
) -> CompletionOutput:
    return replace(
        completion,
        text=prompt_text + completion.text,
        token_ids=[*prompt_token_ids, *completion.token_ids],
    )
