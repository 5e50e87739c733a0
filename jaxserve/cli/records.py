"""What `run` and `bench` write down of an engine at work: --stats_file and --schedule_log.

Checked before anything is loaded, opened (and emptied) once the engine is there, closed at the end.
A run that goes on after a stop (--resume) leaves the files of its earlier parts alone: FILE, FILE.2 and
so on, one a part.
Invariant: each line goes out whole, in one write, so a kill at any time leaves whole lines.
"""

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from jaxserve import __version__
from jaxserve.cli import resume
from jaxserve.cli.arguments import UsageError
from jaxserve.cli.output_files import check_writable, is_same_file
from jaxserve.cli.standard_streams import write_error
from jaxserve.cli.text_engine import EngineLike
from jaxserve.schedule.observer import StepObserver, StepRecord
from jaxserve.schedule.schedule_log import LogHeader, ScheduleLogWriter
from jaxserve.stats import EngineStats

_RECORD_FILES = ("stats_file", "schedule_log")
logger = logging.getLogger("jaxserve.cli")


class LineFile:
    """A file of lines, emptied when it is opened.

    Args:
        path: of the file.

    Raises:
        OutputError: it cannot be opened (or, from `write`, written).
    """

    def __init__(self, path: Path):
        self._path = path
        self._size = 0
        try:
            self._stream = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise write_error(str(path), error) from None

    def write(self, line: str) -> None:
        """Adds a line, which brings its end with it; whole, or not at all."""
        rest = memoryview(line.encode())
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # a pipe
                self._stream.truncate(self._size)
            raise write_error(str(self._path), error) from None
        self._size += len(line.encode())

    def close(self) -> None:
        self._stream.close()


class StatsFile:
    """Writes the engine's figures now and then; a `StepObserver`.

    Args:
        write: takes a line.
        stats: gives the figures.
        interval_s: least seconds between two lines; 0 = a line a step.
        clock: seconds.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        stats: Callable[[], EngineStats],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._write = write
        self._stats = stats
        self._interval_s = interval_s
        self._clock = clock
        self._started = self._last = clock()

    def step_done(self, step: StepRecord) -> None:
        del step
        now = self._clock()
        if now - self._last >= self._interval_s:
            self._last = now
            self.write_line()

    def weights_changed(self) -> None:
        """Changes no figure."""

    def write_line(self) -> None:
        """Writes the figures as they are."""
        figures = {"time_s": round(self._clock() - self._started, 6), **self._stats().to_dict()}
        self._write(json.dumps(figures, separators=(",", ":"), allow_nan=False) + "\n")


@dataclass(frozen=True, kw_only=True)
class RecordFlags:
    """The flags of this module, checked.

    Args:
        stats_file, schedule_log: paths; None = not asked for.
        stats_interval_s: as in `StatsFile`.
        earlier: by flag, the file that was asked for, where it holds an earlier part of the run; the
            flag's own field is then the file of this part.
    """

    stats_file: str | None
    stats_interval_s: float
    schedule_log: str | None
    earlier: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_flags(
        cls, given: Mapping[str, object], taken: Mapping[str, str | None]
    ) -> "RecordFlags":
        """Checks that the files can be written.

        Args:
            given: the command's flags; with a `resume` that is set, files that hold something are kept.
            taken: other files of the command, by their flag: none of them may be overwritten.

        Raises:
            UsageError: a flag is at fault.
        """
        interval_s: float = given["stats_interval_s"]  # type: ignore[assignment]
        if not 0 <= interval_s < math.inf:
            raise UsageError(
                f"--stats_interval_s must be a number of seconds >= 0, got {interval_s:g}"
            )
        num_replicas: int = given.get("data_parallel_size", 1)  # type: ignore[assignment]
        if given["schedule_log"] is not None and num_replicas > 1:
            raise UsageError(
                "--schedule_log: a log is of one engine, --data_parallel_size makes several"
            )
        taken, files, earlier = dict(taken), {}, {}
        for flag in _RECORD_FILES:
            asked: str | None = given[flag]  # type: ignore[assignment]
            files[flag] = asked
            if asked is None:
                continue
            _check_file(flag, asked, taken)
            if given.get("resume") and (part := _next_part(asked)) != asked:
                _check_file(flag, part, taken)
                files[flag], earlier[flag] = part, asked
            taken[flag] = files[flag]
        return cls(stats_interval_s=interval_s, earlier=earlier, **files)

    @property
    def any(self) -> bool:
        return self.stats_file is not None or self.schedule_log is not None


def _check_file(flag: str, path: str, taken: Mapping[str, str | None]) -> None:
    if path in ("", "-"):
        raise UsageError(f"--{flag} needs the name of a file, got {path!r}")
    for other, name in taken.items():
        if name is None:
            continue
        is_same = name != "-" and Path(name).resolve() == Path(path).resolve()
        if is_same or is_same_file(Path(path), name):
            raise UsageError(f"--{flag}={path} and --{other} are the same file")
    check_writable(flag, path)


def _next_part(path: str) -> str:
    """The first of FILE, FILE.2, FILE.3 and so on that holds nothing."""
    number, part = 1, path
    while _holds_something(part):
        number += 1
        part = f"{path}.{number}"
    return part


def _holds_something(path: str) -> bool:
    try:
        return os.stat(path).st_size > 0
    except OSError:  # not there, or not to be had: opening it says why
        return False


class EngineRecords(AbstractContextManager["EngineRecords"]):
    """The open files of a run.

    Args:
        flags: which.
        engine: is observed until the end.
        model: the checkpoint's name or path, for the log's fingerprint.
        options: the options that the engine was made with.

    Raises:
        OutputError: a file cannot be opened.
    """

    def __init__(
        self, flags: RecordFlags, engine: EngineLike, model: str, options: Mapping[str, object]
    ):
        self._engine = engine
        self._files: list[LineFile] = []
        self._observers: list[StepObserver] = []
        self._stats_file: StatsFile | None = None
        self._schedule_log: ScheduleLogWriter | None = None
        if flags.stats_file is not None:
            write = self._open(flags, "stats_file", flags.stats_file).write
            self._stats_file = StatsFile(write, engine.stats, flags.stats_interval_s)
            self._observers.append(self._stats_file)
        if flags.schedule_log is not None:
            header = LogHeader.of(
                engine.stats(),
                version=__version__,
                model=fingerprint(model),
                host_kv_gib=float(options["host_kv_gib"]),  # type: ignore[arg-type]
            )
            write = self._open(flags, "schedule_log", flags.schedule_log).write
            self._schedule_log = ScheduleLogWriter(write, header)
            self._observers.append(self._schedule_log)
        engine.observers.extend(self._observers)

    def _open(self, flags: RecordFlags, flag: str, path: str) -> LineFile:
        if flag in flags.earlier:
            logger.info(
                "--%s=%s holds an earlier part and is kept: this part goes to %s",
                flag,
                flags.earlier[flag],
                path,
            )
        self._files.append(LineFile(Path(path)))
        return self._files[-1]

    def __exit__(self, *exc: object) -> None:
        for observer in self._observers:
            self._engine.observers.remove(observer)
        with contextlib.ExitStack() as stack:  # one that cannot be written does not stop the others
            for file in self._files:
                stack.callback(file.close)
            if self._stats_file is not None:
                stack.callback(self._stats_file.write_line)
            if self._schedule_log is not None:
                stack.callback(self._schedule_log.close)


def fingerprint(model: str) -> str:
    """The hash of a checkpoint that schedule logs and outputs are kept with.

    Raises:
        CheckpointError: there is no such model.
    """
    # Imported here: --help and mistakes do without it.
    from jaxserve.weights.loader import resolve_model

    return resume.model_fingerprint(resolve_model(model))
