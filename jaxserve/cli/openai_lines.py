"""The lines of an OpenAI batch file, for `BatchLoop`: `OpenAiParser` stands where `LineParser` does.

What a line means and how it is answered is `server.openai.batch_file`'s business; this module asks the engine
of this process instead of a server. The server's libraries are imported here when there is such a file.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jaxserve.cli.arguments import UsageError
from jaxserve.cli.request_line import LineParser, RequestLine, json_fields
from jaxserve.cli.text_engine import TextEngine
from jaxserve.errors import InvalidRequestError, RequestError
from jaxserve.request import RequestOutput
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.server.openai.call import Call, Served

LINE_FIELDS = ("custom_id", "method", "url", "body")

logger = logging.getLogger("jaxserve.cli")


def looks_like_openai(data: bytes) -> bool:
    """Whether a line, perhaps a broken one, is one of an OpenAI batch file."""
    return b'"custom_id"' in data or (b'"url"' in data and b'"body"' in data)


def _batch_file() -> ModuleType:
    try:
        from jaxserve.server.openai import batch_file
    except ImportError as error:
        raise UsageError(
            f"an OpenAI batch file needs the server's libraries ({error}): pip install 'jaxserve[serve]'; "
            "--input_format=jsonl reads the input as plain lines"
        ) from None
    return batch_file


@dataclasses.dataclass(kw_only=True)
class OpenAiLine:
    """A line that was understood, or not: then `error` says why.

    Args:
        index: of the line, from 0.
        custom_id: the line's own, if it has one.
        seed: the run's.
        error: why it cannot be run.
        call: what it asks for.
    """

    index: int
    custom_id: str | None
    seed: int
    error: InvalidRequestError | None = None
    call: "Call | None" = None
    _prompts: list[list[int]] = dataclasses.field(default_factory=list)
    _outputs: dict[int, RequestOutput] = dataclasses.field(default_factory=dict)

    def start(self, llm: TextEngine) -> list[str]:
        """Queues the line's requests, one for each of its prompts; all of them, or none.

        Returns:
            Their ids.

        Raises:
            InvalidRequestError: the line is at fault, here or already when it was parsed.
        """
        if self.error is not None or self.call is None:
            raise self.error or InvalidRequestError("the line cannot be run")
        seeded = _batch_file().seeded
        self._prompts = self.call.encode()
        started: list[str] = []
        try:
            for number, request in enumerate(
                self.call.requests(self._prompts, self.call.cache_salt)
            ):
                params = request.sampling_params
                request_id = f"{self.index}-{number}"
                llm.add(
                    request_id,
                    request.prompt_token_ids,
                    seeded(params, seed=self.seed, index=self.index, prompt=number),
                    priority=request.priority,
                    cache_salt=self.call.cache_salt,
                )
                started.append(request_id)
        except InvalidRequestError:
            self.stop(llm)
            raise
        return started

    def stop(self, llm: TextEngine) -> None:
        """Ends what of its requests still runs."""
        for number in range(len(self._prompts)):
            llm.engine.abort(f"{self.index}-{number}")

    def take(self, request_id: str, output: RequestOutput) -> dict[str, Any] | None:
        """Takes the whole output of one of its requests.

        Returns:
            The line's record once it was the last one; None before.

        Raises:
            RequestError: an output is no answer.
        """
        from jaxserve.server.openai.call import failure_of

        failed = failure_of(output)
        if failed is not None:
            raise failed
        self._outputs[int(request_id.rpartition("-")[2])] = output
        if len(self._outputs) < len(self._prompts):
            return None
        assert self.call is not None
        assert self.custom_id is not None
        outputs = [self._outputs[number] for number in range(len(self._prompts))]
        return _batch_file().result(
            self.call, self._prompts, outputs, index=self.index, custom_id=self.custom_id
        )

    def failure(self, error: RequestError) -> dict[str, Any]:
        """The record of a line that has no result."""
        return _batch_file().failure(error, index=self.index, custom_id=self.custom_id)


class OpenAiParser:
    """Parses the lines of one batch file, in order: it remembers the ids it has seen.

    Args:
        llm: what answers them.
        names: of the model, as bodies may have them.
        sampling: fields of `SamplingParams` for what a body does not set.
        seed: the run's seed.
        request: priority, cache_salt and tools for what a body does not set.

    Raises:
        UsageError: the server's libraries are not installed.
    """

    def __init__(
        self,
        llm: TextEngine,
        *,
        names: Sequence[str],
        sampling: Mapping[str, Any],
        seed: int,
        request: Mapping[str, Any],
    ) -> None:
        self._file = _batch_file()
        self._served = _served(llm, names, SamplingParams(**sampling))
        self._seed = seed
        self._defaults = dict(request)
        self._seen_ids: dict[str, int] = {}
        self._warned: set[str] = set()

    def parse(self, index: int, data: bytes) -> OpenAiLine:
        """Reads one line; a line that is at fault comes back with its `error`."""
        line = OpenAiLine(index=index, custom_id=None, seed=self._seed)
        try:
            fields = json_fields(data)
            custom_id = self._file.read_custom_id(fields)
            line.custom_id = custom_id
            self._refuse_second(custom_id, index)
            self._warn_unknown(fields, index)
            line.call = self._file.read_call(
                fields, self._served, index=index, defaults=self._defaults
            )
        except InvalidRequestError as error:
            line.error = error
        return line

    def _refuse_second(self, custom_id: str, index: int) -> None:
        first = self._seen_ids.setdefault(custom_id, index)
        if first != index:
            raise InvalidRequestError(
                f"custom_id {custom_id[:100]!r} was used before, on line {first + 1}",
                param="custom_id",
                code="duplicate_id",
            )

    def _warn_unknown(self, fields: Mapping[str, object], index: int) -> None:
        for name in fields.keys() - set(LINE_FIELDS) - self._warned:
            self._warned.add(name)
            logger.warning(
                "line %d: unknown field %r beside body is ignored; said once for all lines",
                index + 1,
                name[:100],
            )


class EitherParser:
    """Parses the lines of a pipe, whose first line tells what they are.

    Args:
        plain: for JSON lines of this project.
        make_openai: makes the parser of an OpenAI batch file.
    """

    def __init__(self, plain: LineParser, make_openai: Callable[[], OpenAiParser]) -> None:
        self._plain = plain
        self._make_openai = make_openai
        self._chosen: LineParser | OpenAiParser | None = None

    def parse(self, index: int, data: bytes) -> RequestLine | OpenAiLine:
        """As `LineParser.parse` and `OpenAiParser.parse`."""
        if self._chosen is None:
            self._chosen = self._make_openai() if looks_like_openai(data) else self._plain
        return self._chosen.parse(index, data)


def _served(llm: TextEngine, names: Sequence[str], defaults: SamplingParams) -> "Served":
    """What bodies are understood against: this run's model."""
    from jaxserve.async_engine.protocol import ServedModel
    from jaxserve.server.openai.batch_file import check_name
    from jaxserve.server.openai.call import Served
    from jaxserve.server.openai.fields import UnknownFields
    from jaxserve.server.tools.parser import detect_parser

    stats, engine = llm.engine.stats(), llm.engine
    try:
        tokenizer = llm.tokenizer
    except InvalidRequestError:  # the checkpoint has none: its lines give token ids
        tokenizer = None
    model = ServedModel(
        path=names[0],
        max_model_len=stats.max_model_len,
        vocab_size=engine.vocab_size,
        num_slots=stats.num_slots,
        max_num_seqs=stats.max_num_seqs,
        eos_token_ids=tuple(sorted(engine.eos_token_ids)),
        default_sampling_params=defaults,
        tokenizer=tokenizer,
    )
    return Served(
        model=model,
        check_model=lambda name: check_name(name, names),
        tool_parser=None if tokenizer is None else detect_parser(tokenizer.tool_chat_template),
        shows_cached_tokens=False,  # they depend on what ran before
        unknown=UnknownFields(),
    )
