"""What is sent to a server under load, and what is kept of each answer.

Made by `datasets.py` and `client.py`, read by `figures.py`. Times are seconds since the load began, all of
one monotonic clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """One request of a dataset.

    Args:
        body: what is posted, without model, stream and stream_options.
        num_prompt_tokens: of its prompt, where that is known before the server says so.
    """

    body: Mapping[str, Any]
    num_prompt_tokens: int | None = None


@dataclass(kw_only=True)
class RequestRecord:
    """One request's life.

    Args:
        index: its place in the dataset.
        due_s: when it was to be sent.
        sent_s: when it was; later than `due_s` where --max_concurrency held it back.
        release_s: when a part of its output arrived, one entry a part.
        ended_s: when the last chunk with a choice arrived; None: it never ended well.
        num_prompt_tokens: of its prompt, by the server's usage, else by the dataset.
        num_cached_tokens: how many of them were in the prefix cache, where the server says so.
        num_output_tokens: by the server's usage, else the number of parts.
        has_usage: whether the server told the number of tokens.
        finish_reason: the server's, of the first choice.
        text: the output of the first choice.
        failure: why it has no answer, a short name to count by: "http_429", "timeout", "cut", ...; None: it
            has one.
        detail: what exactly happened then.
    """

    index: int
    due_s: float = 0.0
    sent_s: float = 0.0
    release_s: list[float] = field(default_factory=list)
    ended_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    has_usage: bool = False
    finish_reason: str | None = None
    text: str = ""
    failure: str | None = None
    detail: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether it was answered to its end."""
        return self.failure is None and self.ended_s is not None and bool(self.release_s)

    @property
    def ttft_s(self) -> float:
        """From sending it to the first part of its output; of a good one."""
        return self.release_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        """From sending it to the end of its output; of a good one."""
        assert self.ended_s is not None
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first; None where there is only one."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1)
