"""Text with blocks in it: an opener, then what a format's own reader reads.

::

    I will look.  \n  <tool_call>  {"name": …}</tool_call>  \n  <tool_call>  …
    [  text     ][ space, opener ][    the reader's       ][m.][ the next block
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from agentkv.engine.toolcalls.contract import CallPart, Markup, Part, TextPart, ToolParser
from agentkv.engine.toolcalls.cursor import SPACE, Cursor, Reader, lead_of

__all__ = ["BlockParser"]

_ENDED = object()


class BlockParser(ToolParser):
    """White space between a block with a call and its surroundings is markup.

    Where a reader stops, what it has read since its last part is text, and text goes on there. So a broken block is
    text up to where it broke, and the next one is found; nothing that is inside a broken block is called.
    """

    openers: ClassVar[Sequence[str]]
    bare: ClassVar[str] = ""
    """Opens a block where it is the reply's first character other than white space; the reader reads it again."""

    def __init__(self) -> None:
        self._find = re.compile("|".join(map(re.escape, self.openers)))
        self._cursor: Cursor | None = None
        self._reader: Reader[None] | None = None
        # What is not said yet: `_text[_at:]`.
        self._text, self._at = "", 0
        self._begun = not self.bare
        self._behind_call = False
        self._ended = False
        self._parts: list[Part] = []

    @abstractmethod
    def read(self, cursor: Cursor, opener: str) -> Reader[None]:
        """Read a block behind its opener; ``cursor.say`` what is certain. Return where it ends, or cannot go on."""

    def feed(self, text: str) -> list[Part]:
        """See ``ToolParser``."""
        if self._cursor is not None:
            self._cursor.more(text)
        else:
            self._text, self._at = self._text[self._at :] + text, 0
        return self._run()

    def finish(self) -> list[Part]:
        """See ``ToolParser``."""
        self._ended = True
        if self._cursor is not None:
            self._cursor.ended = True
        return self._run()

    def _run(self) -> list[Part]:
        while self._open() if self._reader is None else self._go_on():
            pass
        parts, self._parts = self._parts, []
        return parts

    def _go_on(self) -> bool:
        """Let the reader read; whether it came to its end, so that text goes on."""
        cursor, reader = self._cursor, self._reader
        assert cursor is not None and reader is not None
        waits = next(reader, _ENDED) is not _ENDED
        for part in cursor.parts:
            self._say(part)
        cursor.parts.clear()
        if waits:
            return False
        rest = cursor.take()
        space = len(rest) - len(rest.lstrip(SPACE)) if self._behind_call else 0
        self._say(Markup(rest[:space]))
        self._say(TextPart(rest[space:]))
        self._text, self._at = cursor.text, cursor.at
        self._cursor = self._reader = None
        return True

    def _open(self) -> bool:
        """Say text up to the next opener; whether there is one, so that its reader reads."""
        text = self._text
        if self._behind_call:
            self._say_to(self._past_space(self._at), markup=True)
            if self._at == len(text):
                return False
            self._behind_call = False
        found = self._first(text)
        if found is not None:
            start, stop = found
            self._say_to(lead_of(text, start, self._at))
            self._cursor = Cursor(text, stop, start=self._at, ended=self._ended)
            self._reader = self.read(self._cursor, text[start:stop])
            return True
        self._say_to(len(text) if self._ended else lead_of(text, len(text) - self._begins(), self._at))
        return False

    def _first(self, text: str) -> tuple[int, int] | None:
        """Where the next opener stands."""
        if not self._begun:
            at = self._past_space(self._at)
            if at == len(text):
                return None
            self._begun = True
            if text[at] == self.bare:
                return at, at
        found = self._find.search(text, self._at)
        return None if found is None else found.span()

    def _begins(self) -> int:
        """Length of the longest end of the text that is a beginning of an opener."""
        text, room = self._text, len(self._text) - self._at
        longest = max(map(len, self.openers)) - 1
        tails = (text[len(text) - n :] for n in range(min(longest, room), 0, -1))
        return next((len(tail) for tail in tails if any(o.startswith(tail) for o in self.openers)), 0)

    def _past_space(self, at: int) -> int:
        while at < len(self._text) and self._text[at] in SPACE:
            at += 1
        return at

    def _say_to(self, stop: int, *, markup: bool = False) -> None:
        raw, self._at = self._text[self._at : stop], stop
        self._say(Markup(raw) if markup else TextPart(raw))

    def _say(self, part: Part) -> None:
        if not part.raw:
            return
        if isinstance(part, CallPart):
            self._behind_call = True
        elif isinstance(part, TextPart):
            self._behind_call = False
        self._parts.append(part)
