"""The progress bar of `run`, on stderr, and only where a person looks at it.

`NoProgress` is the same interface without a bar; nothing in the run depends on which one it got.
"""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichBar

from jaxserve.stats import EngineStats

_UPDATE_EVERY_S = 0.1


class NoProgress(AbstractContextManager["NoProgress"]):
    """Shows nothing."""

    def update(
        self, num_done: int, num_output_tokens: int, stats: Callable[[], EngineStats]
    ) -> None:
        """Tells how far the run is: lines done, tokens generated, and where to ask for the pages."""

    def __exit__(self, *exc: object) -> None:
        return None


class ProgressBar(NoProgress):
    """Lines done of all, tokens a second, pages in use.

    Args:
        total: lines of the input, None when that is not known.
        num_done: lines that an earlier run did.
    """

    def __init__(self, total: int | None, num_done: int):
        self._bar = RichBar(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(
                "lines  {task.fields[rate]:.1f} tokens/s  {task.fields[pages]} pages in use"
            ),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            redirect_stdout=False,
        )
        self._task = self._bar.add_task("", total=total, completed=num_done, rate=0.0, pages="0")
        self._started = self._updated = time.monotonic()

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def update(
        self, num_done: int, num_output_tokens: int, stats: Callable[[], EngineStats]
    ) -> None:
        now = time.monotonic()
        if now - self._updated < _UPDATE_EVERY_S and num_done != self._bar.tasks[0].total:
            return
        self._updated = now
        figures = stats()
        num_usable = figures.num_usable_pages
        self._bar.update(
            self._task,
            completed=num_done,
            rate=num_output_tokens / max(now - self._started, 1e-9),
            pages=f"{figures.num_owned_pages}/{num_usable}",
        )

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()


def make_progress(total: int | None, num_done: int, *, prints_text: bool) -> NoProgress:
    """A bar if stderr is a terminal and no generated text runs over the same screen."""
    text_on_screen = prints_text and sys.stdout.isatty()
    return (
        ProgressBar(total, num_done) if sys.stderr.isatty() and not text_on_screen else NoProgress()
    )
