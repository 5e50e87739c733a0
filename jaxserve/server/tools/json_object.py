"""Checks the text of one JSON object while it comes: `JsonObject`. Used by `call_reader`.

Strict as RFC 8259: no NaN, no raw control characters in strings, no commas too many. Each character is
looked at once.

Invariant: once `push` has refused a character, or `is_whole`, nothing more may be pushed.
"""

from dataclasses import dataclass

MAX_DEPTH = 96  # of objects and lists inside each other
_BLANK = " \t\r\n"
_HEX = "0123456789abcdefABCDEF"
_DIGITS = "0123456789"
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
# Of a number: what has been read -> (the next character -> what has been read then).
_NUMBER = {
    "-": {"0": "0", **dict.fromkeys("123456789", "int")},
    "0": {".": ".", "e": "e", "E": "e"},
    "int": {**dict.fromkeys(_DIGITS, "int"), ".": ".", "e": "e", "E": "e"},
    ".": dict.fromkeys(_DIGITS, "frac"),
    "frac": {**dict.fromkeys(_DIGITS, "frac"), "e": "e", "E": "e"},
    "e": {**dict.fromkeys(_DIGITS, "exp"), "+": "e+", "-": "e+"},
    "e+": dict.fromkeys(_DIGITS, "exp"),
    "exp": dict.fromkeys(_DIGITS, "exp"),
}
_NUMBER_ENDS = ("0", "int", "frac", "exp")


@dataclass
class Member:
    """Where one member of the object stands: positions of its first character and behind its last."""

    key_start: int
    key_end: int | None = None
    value_start: int | None = None
    value_end: int | None = None


class JsonObject:
    """The text of one JSON object.

    `members` are those of the object itself, not of what is inside; `is_whole` once it is closed.
    """

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.is_whole = False
        self.length = 0  # characters so far
        self._open = ""  # of the objects and lists that are open, their opening characters
        self._expect = self._root
        self._is_key = False  # of the string that is being read
        self._rest = ""  # of a literal
        self._number = ""
        self._num_hex = 0

    def push(self, char: str) -> bool:
        """Takes one more character; False if it cannot follow."""
        if not self._expect(char):
            return False
        self.length += 1
        return True

    def _root(self, char: str) -> bool:
        return char == "{" and self._enter(char)

    def _enter(self, char: str) -> bool:
        if len(self._open) >= MAX_DEPTH:
            return False
        self._open += char
        self._expect = self._first_key if char == "{" else self._first_item
        return True

    def _leave(self) -> bool:
        self._open = self._open[:-1]
        if not self._open:
            self.is_whole = True
        else:
            self._value_ends(self.length + 1)
        return True

    def _first_key(self, char: str) -> bool:
        return self._leave() if char == "}" else self._key(char)

    def _key(self, char: str) -> bool:
        if char == '"':
            self._is_key = True
            self._expect = self._string
            if len(self._open) == 1:
                self.members.append(Member(self.length))
            return True
        return char in _BLANK

    def _colon(self, char: str) -> bool:
        if char == ":":
            self._expect = self._value
            return True
        return char in _BLANK

    def _first_item(self, char: str) -> bool:
        return self._leave() if char == "]" else self._value(char)

    def _value(self, char: str) -> bool:
        if char in _BLANK:
            return True
        if len(self._open) == 1:
            self.members[-1].value_start = self.length
        if char in "{[":
            return self._enter(char)
        if char == '"':
            self._is_key = False
            self._expect = self._string
        elif char in _LITERALS:
            self._rest = _LITERALS[char]
            self._expect = self._literal
        elif char == "-" or char in _DIGITS:
            self._number = char if char in "-0" else "int"
            self._expect = self._in_number
        else:
            return False
        return True

    def _next(self, char: str) -> bool:
        if char == ",":
            self._expect = self._key if self._open[-1] == "{" else self._value
            return True
        if char == ("}" if self._open[-1] == "{" else "]"):
            return self._leave()
        return char in _BLANK

    def _string(self, char: str) -> bool:
        if char == '"':
            if not self._is_key:
                self._value_ends(self.length + 1)
                return True
            self._expect = self._colon
            if len(self._open) == 1:
                self.members[-1].key_end = self.length + 1
        elif char == "\\":
            self._expect = self._escape
        return char >= " "

    def _escape(self, char: str) -> bool:
        self._num_hex = 4
        self._expect = self._hex if char == "u" else self._string
        return char in '"\\/bfnrtu'

    def _hex(self, char: str) -> bool:
        self._num_hex -= 1
        if not self._num_hex:
            self._expect = self._string
        return char in _HEX

    def _literal(self, char: str) -> bool:
        if char != self._rest[0]:
            return False
        self._rest = self._rest[1:]
        if not self._rest:
            self._value_ends(self.length + 1)
        return True

    def _in_number(self, char: str) -> bool:
        following = _NUMBER[self._number].get(char)
        if following is not None:
            self._number = following
            return True
        if self._number not in _NUMBER_ENDS:
            return False
        self._value_ends(self.length)
        return self._next(char)

    def _value_ends(self, end: int) -> None:
        self._expect = self._next
        if len(self._open) == 1:
            self.members[-1].value_end = end
