"""What happens to sessions, as it happens: for people who watch, and for programs that react."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["EventKind", "Events", "LifecycleEvent"]

logger = logging.getLogger("agentkv.events")

EventKind = Literal[
    "created", "restored", "fallback", "demoted", "evicted", "deleted", "storage_full", "storage_ok", "refused", "lost"
]
_MOST_PENDING = 1024


@dataclass(frozen=True, slots=True)
class LifecycleEvent:
    """One thing that happened. ``at``: unix seconds. ``details``: numbers and words, never what was said.

    ``restored`` and ``demoted`` name tier, tokens, bytes or seconds; ``fallback`` the reason why stored KV was not
    used; ``evicted`` what a retention policy gave up; ``refused`` a turn for which there was no memory; ``lost`` how
    many events a slow reader missed.
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
        """On the event loop; never waits."""
        event = LifecycleEvent(kind, session_id, time.time(), details)
        logger.debug("%s session=%s %s", kind, session_id, " ".join(f"{k}={v}" for k, v in details.items()))
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
