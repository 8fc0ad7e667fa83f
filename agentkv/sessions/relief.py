"""Work for which the device has no memory left: idle sessions give way, and it is tried once more.

The budget says how much KV may be held; what the model needs beside it for a step, and what others use of the device,
it can only leave room for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from agentkv.engine.engine import Engine
from agentkv.logs import Log, fault
from agentkv.memory import OutOfDeviceMemory
from agentkv.sessions.core import SessionCore
from agentkv.sessions.tiers import Tiers

__all__ = ["relieved"]

log = Log(__name__)

T = TypeVar("T")


async def relieved(
    core: SessionCore, tiers: Tiers, engine: Engine, tokens: int, attempt: Callable[[], Awaitable[T]]
) -> T:
    """What ``attempt`` gives, which leaves the session as it was where it raises. Call with the gate held.

    ``tokens``: what the session is to hold. ``CapacityExceeded`` where memory runs out a second time.
    """
    residency = tiers.residency
    try:
        return await attempt()
    except OutOfDeviceMemory as error:
        log.warning("out_of_memory", session=core.id, **fault(error))
    residency.settle(core)
    moved, nbytes = await residency.clear(core)
    await engine.give_back()
    try:
        return await attempt()
    except OutOfDeviceMemory as error:
        raise residency.exhausted(core, tokens, moved, nbytes) from error
