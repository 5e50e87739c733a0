"""What `run` and `bench` need of an `LLM`, and how they get one.

The protocols say how little that is (a test puts something smaller in its place), and keep jax out of
this package's imports until there is a model to load.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from jaxserve.cli.request_line import RequestLine
from jaxserve.executor import Executor
from jaxserve.request import RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.schedule.observer import StepObserver
from jaxserve.stats import EngineStats
from jaxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve.build.from_loaded import StartupTimes


class EngineLike(Protocol):
    """What is needed of `Engine`."""

    def has_work(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def abort(self, request_id: str) -> RequestOutput | None: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def observers(self) -> list[StepObserver]: ...

    @property
    def executor(self) -> Executor: ...


class TextEngine(Protocol):
    """What is needed of `LLM`."""

    @property
    def engine(self) -> EngineLike: ...

    @property
    def startup(self) -> "StartupTimes": ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def encode(self, prompt: str | Sequence[int]) -> list[int]: ...

    def encode_chat(
        self,
        messages: Sequence[dict[str, object]],
        tools: Sequence[dict[str, object]] | None = None,
    ) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def close(self) -> str | None: ...


def add_line(llm: TextEngine, request_id: str, line: RequestLine) -> list[int]:
    """Queues a line.

    Returns:
        Its prompt as token ids.

    Raises:
        InvalidRequestError: the line is at fault, here or already when it was parsed; nothing was queued.
    """
    if line.error is not None:
        raise line.error
    if line.messages is not None:
        token_ids = llm.encode_chat(line.messages, line.tools)
    else:
        token_ids = llm.encode(line.prompt if line.prompt is not None else "")
    llm.add(request_id, token_ids, line.params, priority=line.priority, cache_salt=line.cache_salt)
    return token_ids


def load_llm(model: str, options: Mapping[str, object]) -> TextEngine:
    """Loads the model; here and not earlier jax is imported.

    Raises:
        CheckpointError: there is no such model, or its configuration or headers are at fault; that is
            found out before the slow import.
        JaxserveError: it cannot be served with these options.
    """
    from jaxserve.weights.loader import open_checkpoint, resolve_model

    path = resolve_model(model)
    open_checkpoint(path)

    from jaxserve.llm import LLM

    return LLM(
        str(path), generation_config="none", **options
    )  # its lines know what they start from
