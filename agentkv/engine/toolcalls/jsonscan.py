"""Where a JSON object that arrives in pieces ends, or that it cannot be one any more.

Strict, as RFC 8259 has it: a raw newline in a string or a missing comma is known to be wrong when it comes, not when
the reply is over. Values are read by ``json`` afterwards.
"""

from __future__ import annotations

import re
from typing import Literal

__all__ = ["JsonScanner"]

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = frozenset("0123456789abcdefABCDEF")
_DIGITS = frozenset("0123456789")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
# States of a number: what was read last → what may follow. Those in _WHOLE may end it.
_NUMBER: dict[str, dict[str, str]] = {
    "-": {"0": "0", **dict.fromkeys("123456789", "d")},
    "0": {".": ".", "e": "e", "E": "e"},
    "d": {".": ".", "e": "e", "E": "e", **dict.fromkeys("0123456789", "d")},
    ".": dict.fromkeys("0123456789", "f"),
    "f": {"e": "e", "E": "e", **dict.fromkeys("0123456789", "f")},
    "e": {"+": "s", "-": "s", **dict.fromkeys("0123456789", "x")},
    "s": dict.fromkeys("0123456789", "x"),
    "x": dict.fromkeys("0123456789", "x"),
}
_WHOLE = frozenset("0dfx")

_State = Literal[
    "value", "first item", "first key", "key", "colon", "next", "string", "escape", "hex", "literal", "number"
]


class JsonScanner:
    """Scans one object. ``verdict``: ``more`` until its closing brace was read (``done``), or what came is ``bad``."""

    def __init__(self) -> None:
        self.verdict: Literal["more", "done", "bad"] = "more"
        self._open: list[str] = []
        self._state: _State = "value"
        self._is_key = False
        self._left = ""  # of a literal; of \uXXXX, one character a missing digit
        self._number = ""

    def scan(self, text: str, at: int) -> int:
        """Go on at ``text[at]``. Returns where it stopped: behind the object, at the first wrong character, or at the
        text's end."""
        while at < len(text) and self.verdict == "more":
            if self._state == "string":
                at = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
                if at == len(text):
                    break
            if not self._step(text[at]):
                self.verdict = "bad"
                break
            at += 1
        return at

    def _step(self, letter: str) -> bool:
        """Take one character; whether it can stand here."""
        state = self._state
        if state == "string":
            return self._in_string(letter)
        if state == "number":
            following = _NUMBER[self._number].get(letter)
            if following is not None:
                self._number = following
                return True
            if self._number not in _WHOLE:
                return False
            self._state = state = "next"
        if state in ("escape", "hex", "literal"):
            return self._inside(state, letter)
        if letter in _SPACE:
            return bool(self._open)
        return self._between(state, letter)

    def _in_string(self, letter: str) -> bool:
        if letter == '"':
            self._state = "colon" if self._is_key else "next"
        elif letter == "\\":
            self._state = "escape"
        else:
            return letter >= " "
        return True

    def _inside(self, state: _State, letter: str) -> bool:
        if state == "escape":
            self._state, self._left = ("hex", "....") if letter == "u" else ("string", "")
            return letter in '"\\/bfnrtu'
        if state == "hex":
            self._left = self._left[1:]
            if not self._left:
                self._state = "string"
            return letter in _HEX
        expected, self._left = self._left[0], self._left[1:]
        if not self._left:
            self._state = "next"
        return letter == expected

    def _between(self, state: _State, letter: str) -> bool:
        if state in ("value", "first item"):
            return self._close("[") if letter == "]" and state == "first item" else self._value(letter)
        if state in ("first key", "key"):
            if letter == "}" and state == "first key":
                return self._close("{")
            self._state, self._is_key = "string", True
            return letter == '"'
        if state == "colon":
            self._state = "value"
            return letter == ":"
        if letter == ",":
            self._state = "key" if self._open[-1] == "{" else "value"
            return True
        return letter in "}]" and self._close("{" if letter == "}" else "[")

    def _value(self, letter: str) -> bool:
        if letter in "{[":
            if not self._open and letter == "[":
                return False
            self._open.append(letter)
            self._state = "first key" if letter == "{" else "first item"
            return True
        if not self._open:
            return False
        if letter == '"':
            self._state, self._is_key = "string", False
        elif letter in _LITERALS:
            self._state, self._left = "literal", _LITERALS[letter]
        elif letter == "-" or letter in _DIGITS:
            self._state, self._number = "number", letter if letter in "-0" else "d"
        else:
            return False
        return True

    def _close(self, opened: str) -> bool:
        if self._open.pop() != opened:
            return False
        self._state = "next"
        if not self._open:
            self.verdict = "done"
        return True
