"""Reads one call, {"name": ..., "arguments": {...}}, while it comes: `CallReader`. Used by the parsers.

Invariant: what it has handed out of the arguments is a beginning of one JSON object, written as the
    model wrote it.
"""

import json
from collections.abc import Sequence

from jaxserve.server.tools.deltas import DeltaCollector
from jaxserve.server.tools.json_object import JsonObject

ARGUMENTS = ("arguments", "parameters")  # models mix the two up
MAX_NAME_CHARS = 256  # as written; longer is no function's name
NO_ARGUMENTS = "{}"


class CallReader:
    """One call.

    Args:
        out: takes the call.
        live: hand arguments out while they come.
        needs_arguments: an object without any is no call. Else a function without parameters may be
            called by its name alone.
        other_keys: what the object may hold beside name and arguments; None = anything.
    """

    def __init__(
        self,
        out: DeltaCollector,
        *,
        live: bool,
        needs_arguments: bool,
        other_keys: Sequence[str] | None,
    ) -> None:
        self._out = out
        self._live = live
        self._needs_arguments = needs_arguments
        self._other_keys = other_keys
        self._object = JsonObject()
        self._chars: list[str] = []
        self._num_checked = 0  # members that are read to their end
        self._seen: set[str] = set()
        self._key: str | None = None  # of the member that is being read, once it is known
        self._name: str | None = None
        self._arguments: tuple[int, int | None] | None = None  # where they stand
        self._num_sent: int | None = None  # position up to which arguments are handed out

    @property
    def is_whole(self) -> bool:
        """Whether the call has ended, and is handed out."""
        return self._object.is_whole

    def push(self, char: str) -> bool:
        """Takes one more character; False if this is no call. Then the character was not taken."""
        if not self._object.push(char):
            return False
        self._chars.append(char)
        if self._is_refused():
            self._chars.pop()
            return False
        if self.is_whole:
            self._send_whole()
        return True

    def give_up(self) -> str | None:
        """Ends a call that is not whole.

        Returns:
            Its text; None if part of the call is handed out and stays.
        """
        self.release()
        return None if self._num_sent is not None else "".join(self._chars)

    def release(self) -> None:
        """Hands out what may be handed out before the call is whole."""
        if not self._live or self._name is None or self._arguments is None or self.is_whole:
            return
        start, end = self._arguments
        if self._chars[start] != "{":
            return  # null, which will be written otherwise
        end = self._object.length if end is None else end
        if self._num_sent is None:
            self._out.begin_call(self._name, "".join(self._chars[start:end]))
        elif self._num_sent < end:
            self._out.more_arguments("".join(self._chars[self._num_sent : end]))
        self._num_sent = end

    def _is_refused(self) -> bool:
        """Whether the last character shows that this is no call."""
        if len(self._object.members) == self._num_checked:
            if not self.is_whole:
                return False
            return self._name is None or (self._needs_arguments and self._arguments is None)
        member = self._object.members[self._num_checked]
        if member.key_end is None:
            return False
        if self._key is None:
            self._key = json.loads(self._slice(member.key_start, member.key_end))
            return self._is_bad_key(self._key)
        if member.value_start is None:
            return False
        return self._is_bad_value(self._key, member.value_start, member.value_end)

    def _is_bad_key(self, key: str | None) -> bool:
        kind = "arguments" if key in ARGUMENTS else str(key)
        if kind in self._seen:
            return True
        self._seen.add(kind)
        return not (
            kind in ("name", "arguments") or self._other_keys is None or kind in self._other_keys
        )

    def _is_bad_value(self, key: str, start: int, end: int | None) -> bool:
        if key == "name":
            if self._chars[start] != '"' or self._object.length - start > MAX_NAME_CHARS:
                return True
            if end is not None:
                self._name = json.loads(self._slice(start, end))
                if not self._name or any("\ud800" <= char <= "\udfff" for char in self._name):
                    return True
        elif key in ARGUMENTS:
            if self._chars[start] not in "{n":
                return True
            self._arguments = (start, end)
        if end is None:
            return False
        self._num_checked += 1
        self._key = None
        if self.is_whole:  # a number's end is seen with the object's
            return self._is_refused()
        return False

    def _send_whole(self) -> None:
        start, end = self._arguments or (0, 0)
        text = self._slice(start, end or 0)
        if not text.startswith("{"):
            text = NO_ARGUMENTS
        if self._num_sent is None:
            assert self._name is not None
            self._out.begin_call(self._name, text)
        else:
            self._out.more_arguments(self._slice(self._num_sent, end or 0))
        self._num_sent = len(self._chars)

    def _slice(self, start: int, end: int) -> str:
        return "".join(self._chars[start:end])
