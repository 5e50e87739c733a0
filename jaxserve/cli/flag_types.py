"""The kinds of values that flags take beyond absl's own, with messages that say what is wanted.

Used by `flags.py` and the commands. Every parser raises ValueError; absl puts `flag --name=value: ` before
its text, so the text says only what the value must be.
"""

from absl import flags


class IntegerParser(flags.IntegerParser):
    """An integer."""

    def convert(self, argument: int | str) -> int:
        try:
            return super().convert(argument)
        except (TypeError, ValueError):
            raise ValueError("must be an integer") from None


class FloatParser(flags.FloatParser):
    """A number."""

    def convert(self, argument: int | float | str) -> float:
        try:
            return super().convert(argument)
        except (TypeError, ValueError):
            raise ValueError("must be a number") from None


class AutoIntegerParser(flags.ArgumentParser):
    """An integer, or "auto" for None: the engine chooses."""

    syntactic_help = 'an integer or "auto"'

    def parse(self, argument: str | int | None) -> int | None:
        if argument in (None, "", "auto"):
            return None
        try:
            return int(argument)
        except ValueError:
            raise ValueError(f"must be {self.syntactic_help}") from None

    def flag_type(self) -> str:
        return "int or auto"


class IntegersParser(flags.ArgumentParser):
    """Integers with commas between them."""

    syntactic_help = "integers with commas between them"

    def parse(self, argument: str | list[int]) -> list[int]:
        if isinstance(argument, list):
            return argument
        try:
            return [int(part) for part in argument.split(",")]
        except ValueError:
            raise ValueError(f"must be {self.syntactic_help}") from None

    def flag_type(self) -> str:
        return "integers"
