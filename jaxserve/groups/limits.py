"""What a request may hold: checked by the engine before anything is taken for it."""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError, shown
from jaxserve.field_checks import are_token_ids, require_within
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams


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
            InvalidRequestError: an id outside the vocabulary, in the prompt or in a field of the sampling
                params; a prompt_logprobs_start outside the prompt; no room for the prompt.
        """
        self._check_ids("prompt", prompt)
        start = request.prompt_logprobs_start
        require_within("prompt_logprobs_start", start, 0, len(prompt) - 1)
        self._check_params(request.sampling_params)
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

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", (token_id for token_id, _ in params.bias_pairs))
        for word in params.bad_words:
            if not isinstance(word, str):
                self._check_ids("bad_words", word)

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        token_ids = tuple(token_ids)
        if are_token_ids(token_ids, self.vocab_size):
            return
        for i in token_ids:
            if not 0 <= i < self.vocab_size:
                raise InvalidRequestError(
                    f"{name} token ids must be in [0, {self.vocab_size}), got {shown(i)}",
                    param=name,
                )
