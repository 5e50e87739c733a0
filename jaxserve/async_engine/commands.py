"""What goes over the line between a client and the loop of its engine: commands there, events back.

Plain data. In one process they are handed over as they are; between processes `messages` writes them.

Invariant: each `AddRequest` is answered by exactly one ending, a `Released` part with finished=True or a
`Refused`, and each `Query` or `Change` by one `Answer`, unless `Ended` comes first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.async_engine.protocol import ServedModel
from jaxserve.async_engine.report import EngineReport
from jaxserve.request import Request, RequestOutput
from jaxserve.stats import EngineStats

QueryKind = Literal["stats", "report", "reset_prefix_cache"]


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Run this."""

    request: Request


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """End this, wherever it is; nothing happens where it has ended."""

    request_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """Answer this between two steps.

    Args:
        number: of the answer.
        kind: what is asked for.
        since_step, with_pages: of a report.
    """

    number: int
    kind: QueryKind
    since_step: int = 0
    with_pages: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Do this to the engine between two steps; answered as a query is. Never sent to another process.

    Args:
        number: of the answer.
        kind: which method of `Engine`.
        arguments: its arguments, by name.
    """

    number: int
    kind: Literal["update_params", "sleep", "wake"]
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """Take nothing more, let what runs go on for so many seconds, abort what is left, end.

    Said again, the sooner end counts.
    """

    timeout_s: float


Command = AddRequest | AbortRequest | Query | Change | Stop


@dataclass(frozen=True, slots=True)
class Started:
    """Everything is compiled."""

    model: ServedModel


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The engine could not be made, and has ended.

    Args:
        kind: the name of the error's class.
        message: what it said.
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Released:
    """What one step released, of every request that has news.

    Of the prompt_logprobs of a request only its first part that has some carries them.
    """

    outputs: list[RequestOutput]


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was not taken.

    Args:
        is_invalid: it is at fault; else the engine is.
    """

    request_id: str
    message: str
    param: str | None
    code: str | None
    is_invalid: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """To the query or change of this number.

    Args:
        stats, report: where they were asked for.
        weights_version: of weights that were given.
        error, error_kind: where it failed: what was said, and the name of the error's class.
    """

    number: int
    stats: EngineStats | None = None
    report: EngineReport | None = None
    weights_version: int | None = None
    error: str | None = None
    error_kind: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event: the loop has ended.

    Args:
        reason: why, if nobody asked for it.
    """

    reason: str | None


Event = Started | NotStarted | Released | Refused | Answer | Ended
