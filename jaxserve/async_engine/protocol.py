"""`EngineClient`: what whoever awaits an engine sees of it, wherever it runs; and `ServedModel`.

Implemented by `AsyncEngine` (a thread of this process) and `ProcessEngine` (a process of its own), used
by the server. The same tests run on both.

Invariant: every request that `generate` accepted ends: with its last output, or with an error. None is
left waiting for an engine that is gone.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from jaxserve.async_engine.report import EngineReport
from jaxserve.groups.limits import Limits
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.stats import EngineStats
from jaxserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What an engine serves, as far as those outside need to know it.

    Args:
        path: the model as it was given: a directory, a file, or a fetched name.
        max_model_len: most tokens of a sequence, prompt and output together.
        vocab_size: ids in [0, vocab_size) are accepted.
        num_slots: most tokens that the page pool holds at once.
        max_num_seqs: most sequences in one step.
        eos_token_ids: the end set, ascending.
        default_sampling_params: what the checkpoint recommends, as `LLM.default_sampling_params`.
        tokenizer: made in this process; None where the checkpoint has none.
    """

    path: str
    max_model_len: int
    vocab_size: int
    num_slots: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    default_sampling_params: SamplingParams
    tokenizer: Tokenizer | None

    @property
    def limits(self) -> Limits:
        """What a request may hold: what the engine refuses can be refused before it is sent."""
        return Limits(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            num_slots=self.num_slots,
        )


class EngineClient(Protocol):
    """An engine that is awaited. All methods are called from one event loop."""

    @property
    def model(self) -> ServedModel:
        """What is served; known after `start`."""
        ...

    async def start(self) -> None:
        """Loads the model; returns when everything is compiled.

        Raises:
            ConfigError, CheckpointError: it cannot be served.
            EngineDeadError: the engine ended while it started.
        """
        ...

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        """Runs one request; an async generator of what its steps released.

        Each part holds what is new in it, as `Engine.step` gives it; parts that wait for a slow reader
        are merged (`merge_outputs`). The last one has finished=True. To close the generator (`aclose`, a
        cancelled task) aborts the request within one step. `echo` is not applied: the caller adds the
        prompt.

        Raises:
            InvalidRequestError: before the first part: the request is at fault; nothing was queued.
            EngineDeadError: at any time: the engine is gone, nothing more comes.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request, if it is in flight: its generator's last part has finish_reason "abort"."""
        ...

    async def stats(self) -> EngineStats:
        """Counters and gauges as they stand between two steps."""
        ...

    async def report(self, *, since_step: int = 0, with_pages: bool = False) -> EngineReport:
        """What a dashboard shows.

        Args:
            since_step: only steps after this one.
            with_pages: the map of the page pool too.
        """
        ...

    async def reset_prefix_cache(self) -> None:
        """Gives up every cached page that no sequence uses."""
        ...

    @property
    def failure(self) -> str | None:
        """Why nothing is served any more; None = healthy."""
        ...

    async def wait_failed(self) -> str:
        """Returns `failure` as soon as it is set."""
        ...

    async def shutdown(self, *, timeout_s: float = 0.0) -> None:
        """Ends the engine; new requests are refused at once.

        Args:
            timeout_s: how long what runs may take to end by itself; then it is aborted.
        """
        ...
