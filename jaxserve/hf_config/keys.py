"""A JSON object whose values are checked as they are read.

Used by the modules beside it. Invariant: a value that comes out is of the type and in the range that
was asked for; whatever else is refused by file, key, limit and value.
"""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError, shown
from jaxserve.field_checks import is_int, is_real
from jaxserve.model_config import MAX_INT


class Keys:
    """One object; null counts as absent, as in transformers.

    Args:
        values: the object.
        source: name of the file, for messages.
        prefix: where in the file it stands ("rope_scaling.").

    Raises:
        CheckpointError: `values` is no object.
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = ""):
        if not isinstance(values, Mapping):
            raise CheckpointError(
                f"{source}: {prefix.rstrip('.') or 'the file'} must be an object, got {shown(values)}"
            )
        self.values = values
        self.source = source
        self.prefix = prefix

    def get(self, key: str) -> Any:
        """The value as it stands, or None."""
        return self.values.get(key)

    def error(self, key: str, limit: str) -> CheckpointError:
        """What says that the value of a key is beyond a limit."""
        return CheckpointError(
            f"{self.source}: {self.prefix}{key} must be {limit}, got {shown(self.values.get(key))}"
        )

    def integer(self, key: str, default: int, limit: int = MAX_INT) -> int:
        """An integer from 1 to `limit`; `default` where it is absent."""
        value = self.get(key)
        if value is None:
            return default
        if not (is_int(value) and 1 <= value <= limit):
            raise self.error(key, f"an integer in [1, {limit}]")
        return value

    def optional_integer(self, key: str, limit: int = MAX_INT) -> int | None:
        """An integer from 1 to `limit`, or None where it is absent."""
        return None if self.get(key) is None else self.integer(key, 1, limit)

    def real(self, key: str, default: float | None) -> float:
        """A finite number; `default` where it is absent, unless that is None: then it must be given."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None or not is_real(value):
            raise self.error(key, "a finite number")
        return float(value)

    def optional_real(self, key: str) -> float | None:
        """A finite number, or None where it is absent."""
        return None if self.get(key) is None else self.real(key, None)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false; `default` where it is absent."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def entries(self, key: str, count: int, *, exact: bool = True) -> list[Any] | None:
        """A list of `count` entries (or more, unless `exact`), or None where it is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count or (exact and len(value) > count):
            at_least = "" if exact else "at least "
            raise self.error(key, f"a list of {at_least}{count} entries")
        return value
