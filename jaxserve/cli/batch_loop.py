"""The loop of `jaxserve run`: feeds lines to the engine, steps it, hands finished records to the writer.

Invariant: however long the input, the engine holds at most twice as many requests as it runs in one
step (so its queue is never empty while there are lines), and those of one line more where a line has many
prompts; memory grows with nothing but the ids that were seen.
"""

import logging
from dataclasses import dataclass, field
from typing import Protocol

from jaxserve.cli.openai_lines import OpenAiLine
from jaxserve.cli.progress import NoProgress
from jaxserve.cli.request_line import RequestLine
from jaxserve.cli.run_input import LineSource
from jaxserve.cli.run_output import OrderedWriter, Prompt, error_record, success_record
from jaxserve.cli.stop_signals import StopSignals
from jaxserve.cli.text_engine import TextEngine, add_line
from jaxserve.cli.text_printer import TextPrinter
from jaxserve.errors import InvalidRequestError, JaxserveError, NonFiniteError, RequestError
from jaxserve.request import RequestOutput, merge_outputs

logger = logging.getLogger("jaxserve.cli")


@dataclass(kw_only=True)
class RunTotals:
    """What a run did, for its summary and exit code.

    A request counts its prompt with its first output, so that an interrupted one has both or neither.
    """

    num_ok: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


class Parser(Protocol):
    """Understands lines; one that is at fault comes back with its `error`."""

    def parse(self, index: int, data: bytes) -> RequestLine | OpenAiLine: ...


@dataclass(kw_only=True)
class OutputParts:
    """What the steps released for one line's request so far."""

    line: RequestLine | OpenAiLine
    prompt: Prompt | None = None  # where its output begins with it
    released: list[RequestOutput] = field(default_factory=list)


class BatchLoop:
    """One run over one input.

    Args:
        llm: does the work.
        lines: what to do.
        parser: understands a line.
        writer: takes the records; None where nobody asked for records.
        progress: is told how far the run is.
        printer: takes the text as it comes; None for none.
    """

    def __init__(
        self,
        llm: TextEngine,
        lines: LineSource,
        parser: Parser,
        *,
        writer: OrderedWriter | None,
        progress: NoProgress,
        printer: TextPrinter | None = None,
    ):
        self.totals = RunTotals()
        self.complete = False
        self._llm = llm
        self._lines = lines
        self._parser = parser
        self._writer = writer
        self._progress = progress
        self._printer = printer
        self._next_index = 0
        self._parts: dict[str, OutputParts] = {}
        self._window = 2 * llm.engine.stats().max_num_seqs

    def run(self, stop: StopSignals) -> None:
        """Goes on until every line has its record or a stop is requested; `complete` tells which.

        Raises:
            OutputError: a record cannot be written.
        """
        while not stop.requested:
            self._feed(stop)
            if self._parts:
                self._step()
            elif self._lines.exhausted:
                self.complete = True
                return

    def _feed(self, stop: StopSignals) -> None:
        """Fills the engine's queue with the next lines, as far as there are any by now."""
        while len(self._parts) < self._window and not stop.requested:
            if self._lines.exhausted:
                return
            data = self._lines.next_line(wait=not self._parts)
            if data is None:
                return
            line = self._parser.parse(self._next_index, data)
            self._next_index += 1
            if self._writer is None or not self._writer.has(line.index):
                self._start(line)

    def _start(self, line: RequestLine | OpenAiLine) -> None:
        try:
            if isinstance(line, OpenAiLine):
                for request_id in line.start(self._llm):
                    self._parts[request_id] = OutputParts(line=line)
                return
            token_ids = add_line(self._llm, str(line.index), line)
        except InvalidRequestError as error:
            self._fail(line, error)
            return
        prompt = self._echoed(line, token_ids) if line.params.echo else None
        self._parts[str(line.index)] = OutputParts(line=line, prompt=prompt)

    def _echoed(self, line: RequestLine, token_ids: list[int]) -> Prompt:
        skip = line.params.skip_special_tokens
        prompt = Prompt(token_ids, self._llm.decode(token_ids, skip_special_tokens=skip))
        if self._printer:
            for choice in range(line.params.n):
                self._printer.add(line.index, prompt.text, choice)
        return prompt

    def _step(self) -> None:
        outputs = self._llm.step()
        for output in outputs:
            self._take(output)
        if self._parts and not outputs and not self._llm.engine.has_work():
            raise JaxserveError(f"the engine stopped with {len(self._parts)} requests unanswered")
        self._show_progress()

    def _take(self, output: RequestOutput) -> None:
        parts = self._parts.get(output.request_id)
        if parts is None:  # its line failed with another of its requests, in this step
            return
        if not parts.released:
            self.totals.num_prompt_tokens += output.num_prompt_tokens
            self.totals.num_cached_tokens += output.num_cached_tokens
        parts.released.append(output)
        for piece in output.outputs:
            self.totals.num_output_tokens += len(piece.token_ids)
            if self._printer:
                self._printer.add(parts.line.index, piece.text, piece.index)
                if piece.finish_reason is not None:
                    self._printer.finish(parts.line.index, piece.index)
        if output.finished:
            del self._parts[output.request_id]
            self._finish(parts, merge_outputs(parts.released))

    def _finish(self, parts: OutputParts, output: RequestOutput) -> None:
        line = parts.line
        if isinstance(line, OpenAiLine):
            self._finish_openai(line, output)
            return
        failed = [one for one in output.outputs if one.finish_reason == "error"]
        if not failed:
            self._succeed(line, output, parts.prompt)
            return
        which = "" if line.params.n == 1 else f"output {failed[0].index} of {line.params.n}: "
        num_tokens = len(failed[0].token_ids)
        self._fail(
            line,
            NonFiniteError(
                f"{which}the model computed NaN or infinite values after {num_tokens} output tokens",
                code=str(failed[0].stop_reason),
            ),
        )

    def _finish_openai(self, line: OpenAiLine, output: RequestOutput) -> None:
        try:
            record = line.take(output.request_id, output)
        except RequestError as error:
            line.stop(self._llm)
            self._parts = {key: one for key, one in self._parts.items() if one.line is not line}
            self._fail(line, error)
            return
        if record is not None:
            self.totals.num_ok += 1
            if self._writer:
                self._writer.put(line.index, record)

    def _succeed(
        self, line: RequestLine, output: RequestOutput, prompt: Prompt | None = None
    ) -> None:
        self.totals.num_ok += 1
        if self._writer:
            self._writer.put(line.index, success_record(line, output, prompt))
        if self._printer:
            self._printer.finish(line.index)

    def _fail(self, line: RequestLine | OpenAiLine, error: RequestError) -> None:
        self.totals.num_failed += 1
        if self._writer:
            is_openai = isinstance(line, OpenAiLine)
            record = line.failure(error) if is_openai else error_record(line, error)
            self._writer.put(line.index, record)
        if self._printer:
            logger.error("prompt %d: %s", line.index + 1, error.message)
            self._printer.finish(line.index)
        self._show_progress()

    def _show_progress(self) -> None:
        num_done = self._writer.num_done if self._writer else self.totals.num_ok
        self._progress.update(num_done, self.totals.num_output_tokens, self._llm.engine.stats)
