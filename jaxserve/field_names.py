"""Names of fields that users give: which one was meant, and classes that say so.

Used by the classes that stand at the border (`sampling_params`, `structured_outputs`, `request`, `config`)
and by the command line.
"""

import difflib
import functools
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from jaxserve.errors import shown


def closest(name: object, known: Iterable[str]) -> str | None:
    """The name that was most likely meant; None where none is near."""
    text = str(name)[:100].lower().replace("-", "_")
    found = difflib.get_close_matches(text, list(known), n=1)
    return found[0] if found else None


def checks_names[T](cls: type[T]) -> type[T]:
    """A keyword-only dataclass whose TypeError for an unknown name tells which names there are."""
    known = [field.name for field in fields(cls) if field.init]  # type: ignore[arg-type]
    names = frozenset(known)
    whole = cls.__init__

    @functools.wraps(whole)
    def init(self: Any, *args: Any, **given: Any) -> None:
        if not names.issuperset(given):
            name = next(name for name in given if name not in names)
            near = closest(name, known)
            hint = f"did you mean {near!r}? " if near else ""
            raise TypeError(
                f"{cls.__name__} has no field {shown(name)}; {hint}known: {', '.join(known)}"
            )
        whole(self, *args, **given)

    cls.__init__ = init
    return cls
