"""Reading text that arrives in pieces as if it were all there: a reader waits where the text ends for now.

Readers are generators that yield where they need more. Written so, a format's parser reads like its grammar, and what
it has read is joined once, however small the pieces were.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import replace
from typing import TypeVar

from agentkv.engine.toolcalls.contract import Part
from agentkv.engine.toolcalls.jsonscan import JsonScanner

__all__ = [
    "LEAD",
    "SPACE",
    "Cursor",
    "Reader",
    "json_object",
    "lead_of",
    "literal",
    "one_of",
    "peek",
    "space",
    "until",
    "word",
]

T = TypeVar("T")
Reader = Generator[None, None, T]

SPACE = " \t\n\r"
LEAD = 64
"""Most characters of white space before a call that count as markup: so many are held back while text streams."""


def lead_of(text: str, stop: int, start: int = 0) -> int:
    """Where the white space that ends at ``stop`` begins, no further back than ``start`` or ``LEAD`` characters."""
    at = stop
    while at > max(start, stop - LEAD) and text[at - 1] in SPACE:
        at -= 1
    return at


class Cursor:
    """A place in the text.

    ::

        [ said, as parts | taken: read, and said nothing of yet | at: to be read ]
    """

    def __init__(self, text: str, at: int, *, start: int, ended: bool) -> None:
        """``text[start:at]`` counts as taken. ``ended``: nothing comes after ``text``."""
        self.text = text
        self.at = at
        self.ended = ended
        self.parts: list[Part] = []
        self._start = start
        self._earlier: list[str] = []

    def more(self, text: str) -> None:
        """What follows; everything before must have been read."""
        self._earlier.append(self.text[self._start :])
        self.text, self.at, self._start = text, 0, 0

    def take(self) -> str:
        """What was read and not taken yet."""
        taken = "".join((*self._earlier, self.text[self._start : self.at]))
        self._earlier, self._start = [], self.at
        return taken

    def say(self, part: Part) -> None:
        """Add ``part``, its text what was read and not taken yet."""
        self.parts.append(replace(part, raw=self.take()))


def peek(cursor: Cursor) -> Reader[str]:
    """The next character, not read yet; empty at the end."""
    while cursor.at == len(cursor.text):
        if cursor.ended:
            return ""
        yield
    return cursor.text[cursor.at]


def space(cursor: Cursor) -> Reader[None]:
    """Read white space, as far as there is any."""
    yield from word(cursor, SPACE, inside=True)


def word(cursor: Cursor, letters: Collection[str], *, inside: bool) -> Reader[str]:
    """Read characters in ``letters``, or with ``inside=False`` those that are not."""
    pieces = []
    while letter := (yield from peek(cursor)):
        text, at = cursor.text, cursor.at
        while at < len(text) and (text[at] in letters) is inside:
            at += 1
        if at == cursor.at:
            break
        pieces.append(text[cursor.at : at])
        cursor.at = at
        if at < len(text):
            break
    del letter
    return "".join(pieces)


def literal(cursor: Cursor, wanted: str) -> Reader[bool]:
    """Read ``wanted``; false, and stopped at the first character that differs, where something else stands."""
    return (yield from one_of(cursor, (wanted,))) is not None


def one_of(cursor: Cursor, wanted: Sequence[str]) -> Reader[str | None]:
    """Read one of ``wanted``, none of which begins another; ``None``, stopped where it can be none of them."""
    read = ""
    while read not in wanted:
        letter = yield from peek(cursor)
        if not letter or not any(each.startswith(read + letter) for each in wanted):
            return None
        read += letter
        cursor.at += 1
    return read


def until(cursor: Cursor, closing: str) -> Reader[str | None]:
    """Read up to and including ``closing``, whose first character does not recur in it; what stood before.

    ``None`` where the text ends first.
    """
    pieces = []
    while True:
        pieces.append((yield from word(cursor, closing[0], inside=False)))
        read = 0
        while read < len(closing):
            letter = yield from peek(cursor)
            if letter != closing[read]:
                break
            read += 1
            cursor.at += 1
        if read == len(closing):
            return "".join(pieces)
        pieces.append(closing[:read])
        if not letter:
            return None


def json_object(cursor: Cursor) -> Reader[str | None]:
    """Read one JSON object; its text. ``None``, stopped at the first wrong character, where there is none."""
    scanner = JsonScanner()
    pieces = []
    while (yield from peek(cursor)):
        stop = scanner.scan(cursor.text, cursor.at)
        pieces.append(cursor.text[cursor.at : stop])
        cursor.at = stop
        if scanner.verdict != "more":
            break
    return "".join(pieces) if scanner.verdict == "done" else None
