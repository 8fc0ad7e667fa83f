"""Who waits for device memory, in which order, and how long: a bounded queue, first come first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

__all__ = ["Admission", "QueueFull"]


class QueueFull(Exception):
    """So many wait already that another one had better come back later."""


class Admission:
    """Turns that need memory try in the order in which they came; the first one blocks those behind it.

    Otherwise small turns would pass a large one for ever. ``freed`` is to be called whenever memory was given back, or
    may be: a turn ended, a session was demoted or deleted.
    """

    def __init__(self, most_waiting: int, seconds: float) -> None:
        self._most_waiting = most_waiting
        self._seconds = seconds
        self._line: deque[object] = deque()
        self._changed = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Turns that have no memory yet."""
        return len(self._line)

    def freed(self) -> None:
        """Memory may be free now: the first in line tries again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, attempt: Callable[[], Awaitable[bool]]) -> bool:
        """Whether ``attempt`` succeeded within the deadline. Raises ``QueueFull`` at once where too many wait.

        ``attempt`` is called only while nobody who came earlier waits.
        """
        if len(self._line) >= self._most_waiting:
            raise QueueFull
        place = object()
        self._line.append(place)
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    changed = self._changed
                    if self._line[0] is place and await attempt():
                        return True
                    await changed.wait()
        except TimeoutError:
            return False
        finally:
            self._line.remove(place)
            self.freed()
