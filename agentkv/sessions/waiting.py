"""Waiting for what must not be left half-done."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["outlast"]


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
