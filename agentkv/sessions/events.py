"""What happens to sessions, as it happens: for people who watch, for programs that react, and in the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agentkv.logs import Log

__all__ = ["EventKind", "Events", "LifecycleEvent"]

log = Log("agentkv.events")

EventKind = Literal[
    "created",
    "restored",
    "recomputed",
    "fallback",
    "demoted",
    "evicted",
    "adapted",
    "deleted",
    "storage_full",
    "storage_ok",
    "refused",
    "lost",
]
_MOST_PENDING = 1024
_LEVELS: Mapping[EventKind, int] = {
    "fallback": logging.WARNING,
    "refused": logging.WARNING,
    "lost": logging.WARNING,
    "storage_full": logging.ERROR,
}
"""In the log. The others are the course of things."""


@dataclass(frozen=True, slots=True)
class LifecycleEvent:
    """One thing that happened. ``at``: unix seconds. ``details``: numbers and words, never what was said.

    ``restored`` and ``demoted`` name tier, tokens, bytes or seconds; ``recomputed`` is a restore that was passed over
    since computing was expected to be faster, and like ``restored`` names what either was expected to take;
    ``fallback`` names the reason why stored KV was not used, in a word and (``detail``) in a sentence; ``evicted`` what
    a retention policy gave up; ``adapted`` which policy an adaptive session is under from now on, and which before;
    ``storage_full`` names what the disk said, and a session where it is its tenant's quota that is used up;
    ``refused`` a turn for which there was no memory; ``lost`` how many events a slow reader missed.
    """

    kind: EventKind
    session_id: str | None
    at: float
    details: Mapping[str, Any] = field(default_factory=dict)


class _Reader:
    def __init__(self) -> None:
        self.pending: deque[LifecycleEvent] = deque()
        self.lost = 0
        self.more = asyncio.Event()


class Events:
    """Readers each see everything from when they began; who is too slow is told how much was lost."""

    def __init__(self) -> None:
        self._readers: set[_Reader] = set()
        self._closed = False

    def emit(self, kind: EventKind, session_id: str | None = None, **details: Any) -> None:
        """Tell the readers and the log. On the event loop; never waits."""
        event = LifecycleEvent(kind, session_id, time.time(), details)
        log.at(_LEVELS.get(kind, logging.INFO), kind, session=session_id, **details)
        for reader in self._readers:
            if len(reader.pending) >= _MOST_PENDING:
                reader.pending.popleft()
                reader.lost += 1
            reader.pending.append(event)
            reader.more.set()

    async def read(self) -> AsyncIterator[LifecycleEvent]:
        """Events from now on, until the runtime closes."""
        reader = _Reader()
        self._readers.add(reader)
        try:
            while True:
                while reader.pending:
                    if reader.lost:
                        lost, reader.lost = reader.lost, 0
                        log.at(_LEVELS["lost"], "lost", events=lost)
                        yield LifecycleEvent("lost", None, time.time(), {"events": lost})
                    yield reader.pending.popleft()
                if self._closed:
                    return
                reader.more.clear()
                await reader.more.wait()
        finally:
            self._readers.discard(reader)

    def close(self) -> None:
        """Readers end once they have seen what there was."""
        self._closed = True
        for reader in self._readers:
            reader.more.set()
