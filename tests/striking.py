"""Something that happens to a coroutine while it waits for the n-th time."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

__all__ = ["interrupted"]


@types.coroutine
def interrupted(work: Coroutine[Any, Any, Any], at: int, strike: Callable[[], object]) -> Generator[Any, Any, Any]:
    """Drive ``work``; once it has waited ``at`` times, call ``strike``."""
    step = 0
    result: Callable[[], Any] = lambda: work.send(None)  # noqa: E731
    while True:
        try:
            waited = result()
        except StopIteration as end:
            return end.value
        step += 1
        if step == at:
            asyncio.get_running_loop().call_soon(strike)
        try:
            value = yield waited
        except BaseException as error:
            raised = error
            result = lambda: work.throw(raised)  # noqa: E731, B023
        else:
            result = lambda: work.send(value)  # noqa: E731, B023
