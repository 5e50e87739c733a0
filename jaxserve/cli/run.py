"""`jaxserve run`: prompts in, text out; on the screen as it comes, or as JSON lines that survive anything.

What happens in order: the command line is checked, the output is locked, every file is checked, then the
model is loaded, then the output is opened, then `BatchLoop` runs. So nothing that can be refused is
refused late, a failed start changes no file, and no two runs write one output.
"""

import io
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from jaxserve.cli import resume, text_engine
from jaxserve.cli.arguments import UsageError, parse_arguments
from jaxserve.cli.batch_loop import BatchLoop, Parser, RunTotals
from jaxserve.cli.flags import (
    configure_logging,
    define_engine,
    define_general,
    help_text,
    wants_help,
)
from jaxserve.cli.openai_lines import EitherParser, OpenAiParser
from jaxserve.cli.output_files import partial_path
from jaxserve.cli.output_lock import OutputLock
from jaxserve.cli.parallel_flags import (
    define_parallel,
    end_others_at_exit,
    follow,
    follows,
    have_others,
    joining,
)
from jaxserve.cli.progress import make_progress
from jaxserve.cli.records import EngineRecords
from jaxserve.cli.request_line import LineParser
from jaxserve.cli.run_input import RunInput, open_input, open_prompts
from jaxserve.cli.run_job import RunJob
from jaxserve.cli.run_output import OrderedWriter
from jaxserve.cli.sampling_flags import SamplingSources, define_sampling
from jaxserve.cli.scheduling_flags import define_records
from jaxserve.cli.standard_streams import say, write_error, write_stdout
from jaxserve.cli.stop_signals import StopSignals
from jaxserve.cli.text_printer import TextPrinter
from jaxserve.config import EngineConfig

USAGE = """\
usage: jaxserve run --model=DIR|FILE.gguf|NAME [flags] "a prompt" ...
       jaxserve run --model=DIR|FILE.gguf|NAME --input=FILE|- [--output=FILE|-] [flags]

Prompts on the command line print their text as it comes. An input file holds one JSON object a line:
  {"prompt": "text" or [token ids]} or {"messages": [{"role": ..., "content": ...}, ...]}
with an optional "id", "priority", "cache_salt" and "tools" and any sampling field (docs/sampling.md); or,
with --input_format=text, one prompt a line. An OpenAI batch file (custom_id, method, url, body) is known by
its first line; its results are {"index", "id", "custom_id", "response", "error"}.
Each line, blank and broken ones too, gets one JSON line of output, in order:
  {"index", "id", "text", "token_ids", "finish_reason", "num_prompt_tokens", "num_cached_tokens",
   "num_output_tokens", "stop_reason" if one is known, "logprobs", "top_logprobs", "prompt_logprobs" if asked
   for}
   (with n > 1 "outputs", a list of {"index", "text", "token_ids", "finish_reason", "logprobs"}, instead)
  or {"index", "id", "error": {"message", "type", "param", "code"}}
Finished lines that wait for a slower one are kept in OUTPUT.partial.jsonl; --resume goes on after a stop.
exit code: 0 all good, 1 some lines failed, 2 could not run, 130 or 143 stopped by SIGINT or SIGTERM
"""

logger = logging.getLogger("jaxserve.cli")


def run_flags() -> flags.FlagValues:
    """The flags of this command."""
    values = flags.FlagValues()
    group = {"flag_values": values, "module_name": "input and output"}
    flags.DEFINE_string("input", None, "A file of lines, or - for stdin.", **group)
    flags.DEFINE_enum(
        "input_format",
        "auto",
        ("auto", "jsonl", "openai", "text"),
        "What a line is: JSON (jsonl), a line of an OpenAI batch file, or a prompt; auto = one of the "
        "first two, by the first line.",
        **group,
    )
    flags.DEFINE_string(
        "output", None, "Where the JSON lines go; - for stdout, the default with --input.", **group
    )
    flags.DEFINE_boolean("resume", False, "Go on with an OUTPUT that is not complete.", **group)
    flags.DEFINE_boolean("overwrite", False, "Throw away what OUTPUT holds.", **group)
    flags.DEFINE_boolean(
        "chat",
        False,
        "Send prompts and text lines as a user's message, by the chat template.",
        **group,
    )
    define_sampling(values)
    define_engine(values)
    define_parallel(values)
    flags.DEFINE_enum(
        "scheduling",
        EngineConfig().scheduler.scheduling,
        ("continuous", "static"),
        "static is for comparison only.",
        flag_values=values,
        module_name="engine",
    )
    define_records(values, can_resume=True)
    define_general(values)
    return values


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        0 all good, 1 some lines failed, 128 + signal when it was stopped.

    Raises:
        JaxserveError: it could not run, or could not go on.
    """
    values = run_flags()
    prompts = parse_arguments(argv, values)
    if wants_help(values):
        write_stdout(help_text(USAGE, values) + "\n")
        return 0
    configure_logging(values.flag_values_dict()["verbosity"])
    with StopSignals("before anything was generated") as stop:
        job = RunJob.from_flags(values, prompts)
        if not job.has_work:
            write_stdout(job.sampling_sources().explain(_seed(job)))
            return 0
        if follows(job.engine_options):
            return follow(job.model, job.engine_options)
        lock = OutputLock(job.output_file)
        stop.clean_up_with(lock.release)
        with lock:
            return _run(job, lock, stop)


def _run(job: RunJob, lock: OutputLock, stop: StopSignals) -> int:
    source = open_prompts(job.prompts) if job.prompts else open_input(job.input or "-")
    sampling = job.sampling_sources()
    if job.explain:
        say(sampling.explain(_seed(job)).rstrip("\n"))
    identity, recovered = _check_output(job, source, sampling)
    if job.resume and recovered.num_done:
        logger.info("resuming: %s", _done_before(job, source, recovered))
    if recovered.num_done and recovered.num_done == source.num_lines:
        stop.defer()
        _move_the_last_records(job, recovered)
        return 1 if recovered.num_failed else 0
    with joining(job.engine_options):
        llm = text_engine.load_llm(job.model, job.engine_options)
    if have_others(job.engine_options):
        end_others_at_exit(llm)
    parser = _parser(job, source, sampling, llm)
    identity = _check_engine(job, identity, llm)
    stop.defer()
    lock.keep()
    records = EngineRecords(job.records, llm.engine, job.model, job.engine_options)
    writer = _open_writer(job, identity, recovered)
    progress = make_progress(source.num_lines, recovered.num_done, prints_text=job.prints_text)
    printer = _open_printer(job, writer) if job.prints_text else None
    started = time.monotonic()
    loop = BatchLoop(llm, source.lines, parser, writer=writer, progress=progress, printer=printer)
    try:
        with records, progress:
            loop.run(stop)
    finally:
        if writer:
            writer.close()
        _summarise(
            loop.totals, time.monotonic() - started, llm, _errors_in_all(loop, source, recovered)
        )
        if not loop.complete:
            _tell_what_is_kept(job, source, writer, stop)
    if not loop.complete:
        return stop.exit_code
    return 1 if loop.totals.num_failed + recovered.num_failed else 0


def _parser(
    job: RunJob, source: RunInput, sampling: SamplingSources, llm: text_engine.TextEngine
) -> Parser:
    """What understands the lines."""
    plain = LineParser(
        sampling.sampling,
        seed=_seed(job),
        request=sampling.request,
        is_text=job.is_text,
        is_chat=job.is_chat,
    )

    def openai() -> OpenAiParser:
        return OpenAiParser(
            llm,
            names=(Path(job.model).name, job.model),
            sampling=sampling.sampling,
            seed=_seed(job),
            request=sampling.request,
        )

    if job.is_openai(source.first):
        return openai()
    is_open = job.input_format == "auto" and source.sha256 is None  # a pipe: not read before
    return EitherParser(plain, openai) if is_open else plain


def _seed(job: RunJob) -> int:
    return job.engine_options["seed"]  # type: ignore[return-value]


def _move_the_last_records(job: RunJob, recovered: resume.Recovered) -> None:
    """An earlier run left nothing to do but, perhaps, to move the last records to their place."""
    writer = _open_writer(job, None, recovered)
    if writer:
        writer.close()


def _done_before(job: RunJob, source: RunInput, recovered: resume.Recovered) -> str:
    """What an earlier run did, in words, with the failures that this run's exit code counts too."""
    done, total = recovered.num_done, source.num_lines
    lines = f"all {done} lines" if done == total else f"{done} of {total} lines"
    failed = f", {recovered.num_failed} of them failed" if recovered.num_failed else ""
    return f"{lines} of {job.output} were done before{failed}"


def _errors_in_all(loop: BatchLoop, source: RunInput, recovered: resume.Recovered) -> str:
    """What to add to a resumed run's summary: the errors of the earlier run count in its exit code."""
    if not recovered.num_failed:
        return ""
    num_failed = recovered.num_failed + loop.totals.num_failed
    return f"; {num_failed} of {source.num_lines} lines hold errors"


def _check_output(
    job: RunJob, source: RunInput, sampling: SamplingSources
) -> tuple[dict[str, Any] | None, resume.Recovered]:
    """Refuses what would destroy or mix up finished work; reads what can be continued.

    Returns:
        The identity to write beside the output (None = it is there already, or there is no file), and
        what is done.
    """
    file = job.output_file
    if file is None:
        return None, resume.Recovered()
    if job.resume and source.sha256 is None:
        raise UsageError(
            "--resume cannot continue a run that read a pipe: keep its input in a file"
        )
    identity = job.identity(source.sha256, sampling.values(), is_openai=job.is_openai(source.first))
    if not resume.has_records(file) or job.overwrite:
        return identity, resume.Recovered()
    if not job.resume:
        raise UsageError(
            f"{file} holds results already: give --resume, --overwrite or another --output"
        )
    input_name = "the prompts have" if job.prompts else "the input file has"
    resume.check_identity(file, identity, input_name=input_name)
    assert source.num_lines is not None  # known with its hash
    return None, resume.recover(file, source.num_lines)


def _check_engine(
    job: RunJob, identity: dict[str, Any] | None, llm: text_engine.TextEngine
) -> dict[str, Any] | None:
    """Adds what the engine can serve to a new output's identity; refuses an old one made by another."""
    file = job.output_file
    if file is None:
        return None
    served = resume.served_by(llm.engine.stats())
    if identity is not None:
        return {**identity, "served": served}
    resume.check_served(file, served)
    return None


def _open_writer(
    job: RunJob, identity: Mapping[str, Any] | None, recovered: resume.Recovered
) -> OrderedWriter | None:
    if job.output is None:
        return None
    file = job.output_file
    if file is None:
        return OrderedWriter.to_stream(job.output)
    resume.cut_torn(recovered)
    if identity is not None:
        # Emptied first: a kill in between must not leave old records under a new identity.
        try:
            file.write_bytes(b"")
            partial_path(file).unlink(missing_ok=True)
        except OSError as error:
            raise write_error(str(error.filename), error) from None
        resume.write_identity(file, identity)
    return OrderedWriter.to_file(file, next_index=recovered.next_index, waiting=recovered.waiting)


def _open_printer(job: RunJob, writer: OrderedWriter | None) -> TextPrinter:
    skipped = [i for i in range(len(job.prompts)) if writer is not None and writer.has(i)]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows ?
    return TextPrinter(job.prompts, write_stdout, skipped, num_choices=job.num_choices)


def _summarise(
    totals: RunTotals, wall_s: float, llm: text_engine.TextEngine, errors_in_all: str
) -> None:
    stats = llm.engine.stats()
    logger.info(
        "%d done, %d failed: %d prompt tokens (%d cached), %d output tokens in %.1f s (%.1f tokens/s), "
        "%d preemptions%s",
        totals.num_ok,
        totals.num_failed,
        totals.num_prompt_tokens,
        totals.num_cached_tokens,
        totals.num_output_tokens,
        wall_s,
        totals.num_output_tokens / max(wall_s, 1e-9),
        stats.num_preemptions,
        errors_in_all,
    )


def _tell_what_is_kept(
    job: RunJob, source: RunInput, writer: OrderedWriter | None, stop: StopSignals
) -> None:
    """The line that a stopped or failed run ends with: what is on disk, and how to go on."""
    cause = f"stopped by {stop.name}" if stop.requested else "stopped by an error"
    file = job.output_file
    if writer is None or file is None:
        logger.warning("%s", cause)
        return
    of_all = "" if source.num_lines is None else f" of {source.num_lines}"
    waiting = ""
    if writer.num_waiting:
        verb = "waits" if writer.num_waiting == 1 else "wait"
        waiting = f", {writer.num_waiting} more {verb} in {partial_path(file)}"
    how = "" if source.sha256 is None else "; the same command with --resume goes on"
    logger.warning(
        "%s: %d%s lines are in %s%s%s", cause, writer.next_index, of_all, file, waiting, how
    )
