"""The kinds of values that flags take beyond absl's own, with messages that say what is wanted, and
functions that define flags of them.

Used by `flags.py` and the commands. Every parser raises ValueError; absl puts `flag --name=value: ` before
its text, so the text says only what the value must be.
"""

import json
from typing import Any

from absl import flags

from jaxserve.errors import shown


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


class JsonParser(flags.ArgumentParser):
    """A JSON object or array.

    Args:
        kind: dict or list.
    """

    def __init__(self, kind: type):
        self._kind = kind
        self.syntactic_help = "a JSON object" if kind is dict else "a JSON array"

    def parse(self, argument: Any) -> Any:
        value = _from_json(argument, self.syntactic_help) if isinstance(argument, str) else argument
        if value is not None and not isinstance(value, self._kind):
            raise ValueError(f"must be {self.syntactic_help}")
        return value

    def flag_type(self) -> str:
        return "JSON"


class ListParser(flags.ArgumentParser):
    """Values with commas between them, or a JSON array.

    Args:
        of_integers: they are integers; else texts, and in JSON anything.
    """

    def __init__(self, *, of_integers: bool):
        self._of_integers = of_integers
        what = "integers" if of_integers else "texts"
        self.syntactic_help = f"{what} with commas between them, or a JSON array"

    def parse(self, argument: str | list[Any]) -> list[Any]:
        if isinstance(argument, list):
            return argument
        if argument.lstrip().startswith("["):
            return _from_json(argument, self.syntactic_help)
        parts = argument.split(",")
        if not self._of_integers:
            return list(parts)
        try:
            return [int(part) for part in parts]
        except ValueError:
            raise ValueError(f"must be {self.syntactic_help}") from None

    def flag_type(self) -> str:
        return "list"


class LogprobsParser(flags.ArgumentParser):
    """true, false or an integer."""

    syntactic_help = "true, false or an integer"

    def parse(self, argument: str | int | bool | None) -> int | bool | None:
        if not isinstance(argument, str):
            return argument
        switches = {"true": True, "false": False, "t": True, "f": False}
        if argument.lower() in switches:
            return switches[argument.lower()]
        try:
            return int(argument)
        except ValueError:
            raise ValueError(f"must be {self.syntactic_help}") from None

    def flag_type(self) -> str:
        return "true, false or an integer"


def _from_json(text: str, wanted: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"must be {wanted}, got {shown(text)}") from None


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
