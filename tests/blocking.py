"""Whoever blocks the event loop inside ``agentkv`` is told so, there and, where that is caught, when the test ends."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import blockbuster.blockbuster as library
from blockbuster import BlockBuster, BlockingError

import agentkv

__all__ = ["nothing_blocks"]

_found: list[str] = []
_OURS = str(Path(agentkv.__file__).parent) + "/"
_ALONE = (f"{_OURS}bench/", f"{_OURS}cli/")
_COROUTINE = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class _Noted(BlockingError):
    """Remembers where it was raised: the code that is to be found may catch it."""

    def __init__(self, func: str) -> None:
        super().__init__(func)
        _found.append(f"{self}\n{''.join(traceback.format_stack(limit=12)[:-2])}")


library.BlockingError = _Noted  # type: ignore[misc]
_guard: BlockBuster | None = None


def _made() -> BlockBuster:
    guard = BlockBuster("agentkv")
    for function in guard.functions.values():
        function.can_block_predicate = partial(_may_block, function.can_block_predicate)
        # A log is written as `logging` does. Settings are read by a plain constructor. A database that is new, or of an
        # older version, is migrated where it is opened, before anybody is served from it. asyncpg looks for a password
        # file when it connects.
        function.can_block_in("agentkv/logs.py", "_write")
        function.can_block_in("agentkv/settings.py", ("__init__", "settings_customise_sources"))
        function.can_block_in("agentkv/sessions/db/upgrade.py", "_migrate")
        function.can_block_in("asyncpg/connect_utils.py", ("_read_password_file", "_parse_connect_dsn_and_args"))
    return guard


def _may_block(harmless: Callable[..., bool], *args: object, **named: object) -> bool:
    """Whether this call is ``harmless`` as such, or no coroutine of agentkv is under way in it: plain functions, which
    tests call as they are. Commands and benchmarks have a loop of their own, which nobody else waits for."""
    if harmless(*args, **named):
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if (
            code.co_flags & _COROUTINE
            and code.co_filename.startswith(_OURS)
            and not code.co_filename.startswith(_ALONE)
        ):
            return False
        frame = frame.f_back
    return True


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
