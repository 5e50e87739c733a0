"""Prints the texts of the command line's prompts as they come, in the prompts' order.

The first unfinished prompt is live; what the others produce meanwhile is kept and printed when their
turn comes. One prompt: its text and nothing else. Several: each text under its prompt.
"""

from collections.abc import Callable, Collection, Sequence


class TextPrinter:
    """Called by the run's loop for every piece of text.

    Args:
        prompts: in the order in which they are printed.
        write: prints text at once.
        skipped: indices of prompts that an earlier run did: nothing will come for them.
    """

    def __init__(
        self, prompts: Sequence[str], write: Callable[[str], None], skipped: Collection[int] = ()
    ):
        self._prompts = prompts
        self._write = write
        self._skipped = skipped
        self._current = 0
        self._is_first = True
        self._texts: dict[int, list[str]] = {}
        self._finished: set[int] = set()
        self._begin()

    def add(self, index: int, text: str) -> None:
        """Takes a piece of one prompt's text."""
        if index == self._current:
            self._print(text)
        else:
            self._texts.setdefault(index, []).append(text)

    def finish(self, index: int) -> None:
        """Says that a prompt's text is whole; goes on to the next ones."""
        self._finished.add(index)
        while self._current in self._finished:
            self._print("\n")
            self._current += 1
            self._begin()

    def _begin(self) -> None:
        while self._current in self._skipped:
            self._current += 1
        index = self._current
        if index == len(self._prompts):
            return
        if len(self._prompts) > 1:
            gap = "" if self._is_first else "\n"
            self._is_first = False
            quoted = self._prompts[index].replace("\n", "\n> ")
            self._print(f"{gap}> {quoted}\n")
        self._print("".join(self._texts.pop(index, ())))

    def _print(self, text: str) -> None:
        self._write(text)
