"""Who may come in: `Admission` bounds what waits for the engine, and `Place` is what one request holds of it.

Asked by `ServerState.admit` before anything of a request is rendered. Invariant: what is admitted is never
refused later for the queue's sake, a sequence that the engine preempts included, and every place is
given back exactly once, however its request ends.
"""

from types import TracebackType

from jaxserve.errors import shown
from jaxserve.server.errors import RETRY_AFTER_S, ApiError


class Place:
    """What one request holds of the queue; leaving it, or `release`, gives it back."""

    def __init__(self, admission: "Admission", num_sequences: int) -> None:
        self._admission = admission
        self._num_sequences = num_sequences
        self._num_tokens = 0

    def count_tokens(self, num_tokens: int) -> None:
        """Tells how long the prompts are, once that is known.

        Args:
            num_tokens: of all the request's prompts; tokens of several calls add up.

        Raises:
            ApiError: 429, too many prompt tokens wait already.
        """
        self._admission._add_tokens(num_tokens)
        self._num_tokens += num_tokens

    def started(self, num_tokens: int) -> None:
        """The engine has begun to answer a prompt: its tokens wait no more, those of others do.

        Args:
            num_tokens: of that prompt; it was counted before.
        """
        num_tokens = min(num_tokens, self._num_tokens)
        self._admission._num_tokens -= num_tokens
        self._num_tokens -= num_tokens

    def release(self) -> None:
        """Gives the place back; a second call does nothing."""
        self.started(self._num_tokens)
        self._admission._num_sequences -= self._num_sequences
        self._num_sequences = 0

    def __enter__(self) -> "Place":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    async def __aenter__(self) -> "Place":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class Admission:
    """Counts the sequences and prompt tokens that were let in and have not ended.

    Args:
        num_running: sequences that the engine runs at once: so many of those let in wait for nobody.
        max_queue_requests: how many more may be in.
        max_queue_tokens: most tokens of prompts that have not started; None = no limit.
    """

    def __init__(
        self, *, num_running: int, max_queue_requests: int, max_queue_tokens: int | None
    ) -> None:
        self._most = num_running + max_queue_requests
        self._num_running = num_running
        self._max_queue_requests = max_queue_requests
        self._max_queue_tokens = max_queue_tokens
        self._num_sequences = 0
        self._num_tokens = 0
        self.num_refused = 0

    @property
    def num_sequences(self) -> int:
        """Sequences that are in: running or waiting."""
        return self._num_sequences

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of prompts that have not started."""
        return self._num_tokens

    def admit(self, *, num_sequences: int = 1, num_tokens: int = 0) -> Place:
        """A place for a request, to be used in a `with` or an `async with`.

        Args:
            num_sequences: choices of all its prompts.
            num_tokens: tokens of its prompts, as far as known.

        Raises:
            ApiError: 429, the queue is full; 400, it would not fit into an empty one.
        """
        if num_sequences > self._most:
            raise ApiError(
                400,
                f"n times the number of prompts must be at most {self._most}, what this server runs "
                f"and queues at once, got {shown(num_sequences)}",
                param="n",
            )
        if self._num_sequences + num_sequences > self._most:
            raise self._refuse(
                f"the queue is full: {self._num_sequences} sequences are in, at most "
                f"{self._num_running} run and {self._max_queue_requests} wait"
            )
        place = Place(self, num_sequences)
        self._num_sequences += num_sequences
        try:
            place.count_tokens(num_tokens)
        except ApiError:
            place.release()
            raise
        return place

    def _add_tokens(self, num_tokens: int) -> None:
        most = self._max_queue_tokens
        if most is not None and self._num_tokens and self._num_tokens + num_tokens > most:
            raise self._refuse(
                f"the queue is full: {self._num_tokens} prompt tokens wait, at most {most} may, and "
                f"this request has {num_tokens}"
            )
        self._num_tokens += num_tokens

    def _refuse(self, message: str) -> ApiError:
        self.num_refused += 1
        return ApiError(
            429, message, code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)}
        )
