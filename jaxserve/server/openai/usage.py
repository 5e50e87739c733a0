"""What a reply cost in tokens: `UsageCounter` adds it up as outputs come. Used by `replies`."""

from typing import Any

from jaxserve.request import RequestOutput


class UsageCounter:
    """Tokens of all prompts and choices of one reply.

    Args:
        shows_cached: whether `prompt_tokens_details.cached_tokens` is given.
    """

    def __init__(self, *, shows_cached: bool) -> None:
        self._shows_cached = shows_cached
        self._prompts: dict[int, int] = {}  # prompt -> its tokens
        self._num_cached = 0
        self._num_output = 0

    def add(self, prompt: int, output: RequestOutput) -> None:
        """Counts a part of a prompt's output; the prompt itself with its first part."""
        if prompt not in self._prompts:
            self._prompts[prompt] = output.num_prompt_tokens
            self._num_cached += output.num_cached_tokens
        for one in output.outputs:
            self._num_output += len(one.token_ids)

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        num_prompt = sum(self._prompts.values())
        found: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_output,
            "total_tokens": num_prompt + self._num_output,
        }
        if self._shows_cached:
            found["prompt_tokens_details"] = {"cached_tokens": self._num_cached}
        return found
