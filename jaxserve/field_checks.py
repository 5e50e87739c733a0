"""Checks of single values from users, for the classes that stand at the border.

Used by `sampling_params`, `request`, the tokenizer and the engine. Every one raises
InvalidRequestError with the field's name, the value and the limit, and looks at no more of a list than
its limit allows.
"""

import itertools
import sys
from collections.abc import Collection, Iterable
from numbers import Integral, Real
from typing import Any

from jaxserve.errors import InvalidRequestError, shown

LARGEST_FLOAT = sys.float_info.max
MAX_TOKEN_ID = 2**31 - 1


def require(ok: bool, name: str, value: object, limit: str) -> None:
    """Raises InvalidRequestError with the field, its limit and the value, unless `ok`."""
    if not ok:
        raise InvalidRequestError(f"{name} must be {limit}, got {shown(value)}", param=name)


def plain(value: Any) -> Any:
    """Numbers of other libraries (a numpy scalar) as Python's own; everything else as it is."""
    if isinstance(value, bool | int) or type(value) is float:
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def is_int(value: object) -> bool:
    """A plain integer; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """A finite number; True and False are none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared, not converted: an integer may be beyond every float, and NaN fails each comparison.
    return is_number and -LARGEST_FLOAT <= value <= LARGEST_FLOAT  # type: ignore[operator]


def require_within(name: str, value: object, least: int, most: int) -> None:
    """Requires an integer in [least, most]."""
    ok = is_int(value) and least <= value <= most  # type: ignore[operator]
    require(ok, name, value, f"an integer in [{least}, {most}]")


def require_real(name: str, value: object) -> None:
    """Requires a finite number."""
    require(is_real(value), name, value, "a finite number")


def require_real_within(name: str, value: object, least: float, most: float) -> None:
    """Requires a finite number in [least, most]."""
    require_real(name, value)
    require(least <= value <= most, name, value, f"in [{least:g}, {most:g}]")  # type: ignore[operator]


def require_bool(name: str, value: object) -> None:
    """Requires True or False."""
    require(isinstance(value, bool), name, value, "a boolean")


def checked_list(name: str, value: object, *, what: str, most: int) -> list[Any]:
    """The elements of a list that a user gave, copied; they are not looked at.

    Args:
        name: the field.
        value: a list, a tuple, an array or another iterable, but no text and no mapping.
        what: what it has to be, for the message: "a list of token ids".
        most: how many elements it may have.

    Raises:
        InvalidRequestError: it is no such thing, or it has more elements.
    """
    is_list = not isinstance(value, str | bytes | dict) and isinstance(value, Iterable)
    if (
        not is_list or getattr(value, "ndim", 1) != 1
    ):  # an array of no dimension only looks iterable
        require(False, name, value, what)
    items = list(itertools.islice(value, most + 1))  # type: ignore[arg-type]
    if len(items) > most:
        size = str(len(value)) if hasattr(value, "__len__") else "more"  # type: ignore[arg-type]
        raise InvalidRequestError(
            f"{name} must have {most} elements or fewer, got {size}", param=name
        )
    return items


def checked_token_ids(
    name: str, value: object, *, most: int, what: str = "a list of token ids"
) -> tuple[int, ...]:
    """Token ids that a user gave, as plain integers from 0 up. The vocabulary is not known here.

    Args:
        name: the field.
        value, most: as in `checked_list`.
        what: what it has to be, for the message.

    Raises:
        InvalidRequestError: it is no list, too long, or an element is no token id.
    """
    ids = checked_list(name, value, what=what, most=most)
    if are_token_ids(ids):  # as almost always, and quick for many
        return tuple(ids)
    ids = [plain(i) for i in ids]
    for i in ids:
        if not is_int(i) or not 0 <= i <= MAX_TOKEN_ID:
            raise InvalidRequestError(
                f"{name} must be {what} (integers >= 0), got the element {shown(i)}", param=name
            )
    return tuple(ids)


def are_token_ids(ids: Collection[object], end: int = MAX_TOKEN_ID + 1) -> bool:
    """Whether all of these are plain integers in [0, end); quick, because nothing looks at them one by
    one in Python.
    """
    if not ids:
        return True
    return set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < end  # type: ignore[type-var]


def utf8(name: str, text: str) -> bytes:
    """A text in UTF-8.

    Raises:
        InvalidRequestError: it holds half of a surrogate pair, which is no character; param is `name`.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} must be valid Unicode text, got the lone surrogate {text[error.start]!r} at "
            f"character {error.start}",
            param=name,
        ) from error
