"""Token ids to text, one token at a time, ending at stop strings.

tokenizers' ``DecodeStream`` does the first half, but cannot be flushed, raises when a decoder revises what it said,
and decodes an endless run of broken bytes in quadratic time; so the window is kept here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from agentkv.engine.encode import backend_of
from agentkv.errors import InvalidRequest

__all__ = ["Delta", "TextStream"]

_CONTEXT_TOKENS = 8
_LONGEST_PENDING = 16  # tokens; a character has at most 4 bytes


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token adds to the text. ``stopped``: a stop string is complete; nothing follows."""

    text: str
    stopped: bool


class TextStream:
    """Incremental text of one reply. Not thread-safe: one thread pushes, at a time.

    Held back are incomplete UTF-8 characters, and text that may be the beginning of a stop string. Of several stop
    strings the one that is complete first counts, and of those the longest; so the result does not depend on how the
    text was tokenised. With ``skip_special`` special tokens have no text, and no stop string can match them; with
    ``hidden`` those ids alone have none.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        *,
        skip_special: bool = True,
        hidden: Collection[int] | None = None,
        context: Sequence[int] = (),
    ) -> None:
        """``context``: the ids before the reply; with them a SentencePiece word keeps its leading space."""
        if not all(stop):
            raise InvalidRequest("stop: an empty string would stop before the first token", param="stop")
        self._backend = backend_of(tokenizer)
        self._skip_special = skip_special and hidden is None
        self._hidden = hidden or ()
        self._stop = tuple(stop)
        # The window is [said tokens | pending tokens]; `_said` is the text of the first part.
        self._window: list[int] = list(context[-_CONTEXT_TOKENS:])
        self._said_tokens = len(self._window)
        self._said = self._decode(self._window)
        self._held = ""
        self._emitted: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """All text emitted so far."""
        return "".join(self._emitted)

    def push(self, token_id: int) -> Delta:
        """The text that is certain with this token. After a stop string every further token adds nothing."""
        if self.stopped:
            return Delta("", True)
        self._window.append(token_id)
        return Delta(self._emit(self._advance()), self.stopped)

    def flush(self) -> str:
        """What was held back: no stop string was completed, and a broken character becomes U+FFFD."""
        if self.stopped:
            return ""
        tail = self._decode(self._window)
        text = self._emit(self._beyond(tail))
        self._say(self._window[self._said_tokens :])
        if not self.stopped:
            text += self._held
            self._emitted.append(self._held)
            self._held = ""
        return text

    def _decode(self, ids: list[int]) -> str:
        shown = [i for i in ids if i not in self._hidden] if self._hidden else ids
        return self._backend.decode(shown, skip_special_tokens=self._skip_special)

    def _advance(self) -> str:
        """Text that the pending tokens make certain; empty while they end inside a character."""
        whole = self._decode(self._window)
        if not whole.endswith("\ufffd"):
            text = self._beyond(whole)
            if text or len(self._window) - self._said_tokens > _LONGEST_PENDING:
                self._say(self._window[self._said_tokens :])
            return text
        pending = self._window[self._said_tokens :]
        if len(pending) <= _LONGEST_PENDING:
            return ""
        # Broken bytes, on and on: say all but the last few, cut where no character is torn.
        for keep in range(4, 8):
            left = self._window[:-keep]
            if self._decode(left) + self._decode(self._window[-keep:]) == whole:
                text = self._beyond(self._decode(left))
                self._say(pending[:-keep], pending[-keep:])
                return text
        return ""

    def _beyond(self, whole: str) -> str:
        if whole.startswith(self._said):
            return whole[len(self._said) :]
        # The decoder revised earlier text (byte-fallback runs, clean-up): what was said stays.
        return self._decode(self._window[self._said_tokens :])

    def _say(self, said: list[int], pending: Sequence[int] = ()) -> None:
        self._window = [*said, *pending]
        self._said_tokens = len(said)
        self._said = self._decode(said)

    def _emit(self, text: str) -> str:
        """Move what can no longer be part of a stop string from held to emitted."""
        if not text:
            return ""
        held = self._held + text
        ends = [(at + len(stop), at) for stop in self._stop if (at := held.find(stop)) >= 0]
        if ends:
            _, cut = min(ends)
            self.stopped, self._held = True, ""
        else:
            cut = len(held) - max((_overlap(held, stop) for stop in self._stop), default=0)
            self._held = held[cut:]
        self._emitted.append(held[:cut])
        return held[:cut]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
