"""Waiting for what must not be left half-done."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["finished", "outlast"]


async def outlast(awaitable: Any) -> Any:
    """The result of ``awaitable``, however often the waiter is cancelled meanwhile. Its exceptions are raised."""
    task = asyncio.ensure_future(awaitable)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
    return task.result()


async def finished(work: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait for ``work`` to its end. Its exceptions are raised; a cancellation meanwhile is given back, for later."""
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError as error:
        await outlast(work)
        return error
    return None
