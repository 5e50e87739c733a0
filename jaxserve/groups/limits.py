"""What a request may hold: checked by the engine before anything is taken for it."""

from collections.abc import Sequence as Several
from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError, shown
from jaxserve.field_checks import require_within
from jaxserve.request import Request


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What can be served.

    Args:
        vocab_size: ids in [0, vocab_size) are accepted.
        max_model_len: most tokens of a sequence, prompt and output together.
        num_slots: tokens that the whole page pool holds.
    """

    vocab_size: int
    max_model_len: int
    num_slots: int

    def output_budget(self, request: Request, prompt: Several[int]) -> int:
        """Checks a request's prompt and returns how many tokens it may generate.

        Args:
            request: its sampling params say what is asked for.
            prompt: its prompt, as plain ids.

        Raises:
            InvalidRequestError: an id outside the vocabulary; a prompt_logprobs_start outside the
                prompt; no room for the prompt.
        """
        for i in prompt:
            if not 0 <= i < self.vocab_size:
                raise InvalidRequestError(
                    f"prompt token ids must be in [0, {self.vocab_size}), got {shown(i)}",
                    param="prompt",
                )
        start = request.prompt_logprobs_start
        require_within("prompt_logprobs_start", start, 0, len(prompt) - 1)
        asked = request.sampling_params.max_tokens
        least = 0 if asked == 0 else 1
        room = self.max_model_len - len(prompt)
        if room < least:
            raise InvalidRequestError(
                f"prompt has {len(prompt)} tokens and needs room for {least} more, but the context "
                f"holds {self.max_model_len} (max_model_len)",
                param="prompt",
                code="context_length_exceeded",
            )
        if asked == 0 and request.sampling_params.prompt_logprobs is None:
            return 0  # nothing is computed
        # The last token sampled is never computed, so it needs no slot.
        pool_room = self.num_slots - len(prompt) + 1
        if pool_room < 1:
            raise InvalidRequestError(
                f"prompt has {len(prompt)} tokens, but the whole KV page pool holds "
                f"{self.num_slots}: it could never run (raise num_pages or kv_cache_gib)",
                param="prompt",
                code="kv_cache_exceeded",
            )
        room = min(room, pool_room)
        return room if asked is None else min(asked, room)
