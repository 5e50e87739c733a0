"""The kinds of values that flags take beyond absl's own, with messages that say what is wanted, and
functions that define flags of them.

Used by `flags.py` and the commands. Every parser raises ValueError; absl puts `flag --name=value: ` before
its text, so the text says only what the value must be.
"""

from typing import Any

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


class AutoIntegersParser(IntegersParser):
    """Integers with commas between them, or "auto" for None: the engine chooses."""

    syntactic_help = 'integers with commas between them, or "auto"'

    def parse(self, argument: str | list[int] | None) -> list[int] | None:
        return None if argument in (None, "", "auto") else super().parse(argument)

    def flag_type(self) -> str:
        return "integers or auto"


def define_integer(
    name: str,
    default: int | None,
    text: str,
    *,
    lower_bound: int | None = None,
    upper_bound: int | None = None,
    **group: Any,
) -> None:
    """As `absl.flags.DEFINE_integer`, with a message that says what is wanted."""
    parser = IntegerParser(lower_bound=lower_bound, upper_bound=upper_bound)
    flags.DEFINE(parser, name, default, text, serializer=flags.ArgumentSerializer(), **group)


def define_integers(name: str, text: str, **group: Any) -> None:
    """Integers with commas between them; the default is "auto"."""
    flags.DEFINE(AutoIntegersParser(), name, None, text, **group)


def define_float(name: str, default: float | None, text: str, **group: Any) -> None:
    """As `absl.flags.DEFINE_float`, with a message that says what is wanted."""
    flags.DEFINE(FloatParser(), name, default, text, serializer=flags.ArgumentSerializer(), **group)


def define_auto_integer(name: str, text: str, **group: Any) -> None:
    """An integer flag whose default is "auto"."""
    flags.DEFINE(AutoIntegerParser(), name, None, text, **group)
