"""Prints the texts of the command line's prompts as they come, in the prompts' order.

The first unfinished prompt is live; what the others produce meanwhile is kept and printed when their
turn comes. One prompt: its text and nothing else. Several: each text under its prompt. With several
outputs for a prompt each begins with its number in brackets.
"""

from collections.abc import Callable, Collection, Sequence


class TextPrinter:
    """Called by the run's loop for every piece of text.

    Args:
        prompts: in the order in which they are printed.
        write: prints text at once.
        skipped: indices of prompts that an earlier run did: nothing will come for them.
        num_choices: outputs of each prompt.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        write: Callable[[str], None],
        skipped: Collection[int] = (),
        num_choices: int = 1,
    ):
        self._prompts = prompts
        self._write = write
        self._skipped = skipped
        self._num_choices = num_choices
        self._current = (0, 0)  # prompt, choice
        self._is_first = True
        self._texts: dict[tuple[int, int], list[str]] = {}
        self._finished: set[tuple[int, int]] = set()
        self._begin()

    def add(self, index: int, text: str, choice: int = 0) -> None:
        """Takes a piece of the text of one of a prompt's outputs."""
        if (index, choice) == self._current:
            self._print(text)
        else:
            self._texts.setdefault((index, choice), []).append(text)

    def finish(self, index: int, choice: int | None = None) -> None:
        """Says that a text is whole, or (None) all of a prompt's; goes on to the next ones."""
        choices = range(self._num_choices) if choice is None else [choice]
        self._finished.update((index, one) for one in choices)
        while self._current in self._finished:
            self._print("\n")
            index, choice = self._current
            is_last = choice + 1 == self._num_choices
            self._current = (index + 1, 0) if is_last else (index, choice + 1)
            self._begin()

    def _begin(self) -> None:
        while self._current[0] in self._skipped:
            self._current = self._current[0] + 1, 0
        index, choice = self._current
        if index == len(self._prompts):
            return
        if len(self._prompts) > 1 and choice == 0:
            gap = "" if self._is_first else "\n"
            self._is_first = False
            quoted = self._prompts[index].replace("\n", "\n> ")
            self._print(f"{gap}> {quoted}\n")
        if self._num_choices > 1:
            self._print(f"[{choice}] ")
        self._print("".join(self._texts.pop(self._current, ())))

    def _print(self, text: str) -> None:
        self._write(text)
