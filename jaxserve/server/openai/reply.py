"""`CommonReply`: what the answers of both endpoints have in common. Extended by `completions` and `chat`.

Invariant: what a choice, the usage and the end of a stream look like is said once for both.
"""

from typing import Any

from jaxserve.request import RequestOutput
from jaxserve.server.openai.call import Call
from jaxserve.server.openai.choices import ChoiceOptions
from jaxserve.server.openai.logprobs import TokenNames
from jaxserve.server.openai.sse import DONE, ChunkWriter


class CommonReply[Choice]:
    """A `Reply` but for its bodies.

    Args:
        call: what it answers.
        kind: the `object` of a chunk.
    """

    def __init__(self, call: Call, kind: str) -> None:
        self._streaming = call.streaming
        self._usage = call.usage_counter()
        self._writer = ChunkWriter(call.head(kind), says_usage=call.streaming.include_usage)
        self._options = ChoiceOptions(
            names=TokenNames(call.served.model.tokenizer, as_ids=call.tokens_as_ids),
            num_logprobs=call.num_logprobs,
            skip_special_tokens=call.params.skip_special_tokens,
            return_token_ids=call.return_token_ids,
        )
        self._choices: dict[int, Choice] = {}

    def end(self) -> bytes:
        """See `Reply`."""
        if not self._streaming.include_usage:
            return DONE
        return self._writer.usage(self._usage.body()) + DONE

    def _count(self, prompt: int, output: RequestOutput) -> dict[str, Any] | None:
        """Counts the tokens of a part; the usage so far, where each chunk tells it."""
        self._usage.add(prompt, output)
        return self._usage.body() if self._streaming.continuous_usage_stats else None

    def _new_choice(self, index: int) -> Choice:
        """A choice that has said nothing yet."""
        raise NotImplementedError

    def _choice(self, index: int) -> Choice:
        if index not in self._choices:
            self._choices[index] = self._new_choice(index)
        return self._choices[index]
