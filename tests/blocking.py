"""Whoever blocks the event loop inside ``agentkv`` is told so, there and, where that is caught, when the test ends."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import blockbuster.blockbuster as library
from blockbuster import BlockBuster, BlockingError

__all__ = ["nothing_blocks"]

_found: list[str] = []


class _Noted(BlockingError):
    """Remembers where it was raised: the code that is to be found may catch it."""

    def __init__(self, func: str) -> None:
        super().__init__(func)
        _found.append(f"{self}\n{''.join(traceback.format_stack(limit=12)[:-2])}")


library.BlockingError = _Noted  # type: ignore[misc]
_guard: BlockBuster | None = None


def _made() -> BlockBuster:
    # These are plain functions, which tests call as they are: they count where the rest of agentkv has called them.
    # Commands have a loop of their own, which nobody else waits for.
    plain = [f"agentkv.{name}" for name in ("bench", "cli", "models", "storage")]
    guard = BlockBuster("agentkv", excluded_modules=plain)
    for function in guard.functions.values():
        # A log is written as `logging` does. Settings are read by a plain constructor. A database that is new, or of an
        # older version, is migrated where it is opened, before anybody is served from it.
        function.can_block_in("agentkv/logs.py", "_write")
        function.can_block_in("agentkv/settings.py", ("__init__", "settings_customise_sources"))
        function.can_block_in("agentkv/sessions/db/upgrade.py", "_migrate")
    return guard


@contextmanager
def nothing_blocks() -> Iterator[list[str]]:
    """While it lasts, a call on the event loop that blocks raises ``BlockingError`` where ``agentkv`` has made it.
    Yields what was found, which the caller checks, and may clear."""
    global _guard
    if _guard is None:
        _guard = _made()
    _found.clear()
    _guard.activate()
    try:
        yield _found
    finally:
        _guard.deactivate()
