"""Sessions that no client has named go when they have been idle for long, or are too many."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from aiohttp import web

from agentkv.api.calls import KV, SERVER
from agentkv.errors import AgentKVError, Closed, SessionNotFound
from agentkv.logs import Log, fault

__all__ = ["MADE", "expiring"]

log = Log(__name__)

MADE: web.AppKey[asyncio.Event] = web.AppKey("anonymous_made", asyncio.Event)
"""Set where a session is made that nobody has named."""
_LONGEST_PAUSE, _SHORTEST_PAUSE = 60.0, 1.0


async def expiring(app: web.Application) -> AsyncGenerator[None]:
    """While the application runs, they are looked at: each minute, and soon after there is a new one."""
    app[MADE] = asyncio.Event()
    task = asyncio.create_task(_watch(app), name="agentkv-anonymous")
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _watch(app: web.Application) -> None:
    pause = min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, app[SERVER].anonymous_seconds))
    while True:
        try:
            while await _delete_some(app):
                pass
        except Closed:
            return
        except AgentKVError as error:
            log.warning("anonymous_sessions_not_deleted", **fault(error))
        await asyncio.sleep(_SHORTEST_PAUSE)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(app[MADE].wait(), pause)
        app[MADE].clear()


async def _delete_some(app: web.Application) -> int:
    """How many are gone."""
    kv, server = app[KV], app[SERVER]
    repository = kv.sessions.repository
    found = await repository.expired_sessions(time.time() - server.anonymous_seconds, server.anonymous_sessions)
    busy = {core.id for core in kv.sessions.cores() if core.turns}
    gone = 0
    for tenant, name in found:
        if name not in busy:
            with contextlib.suppress(SessionNotFound):
                await kv.tenant(tenant).delete(name)
                gone += 1
    return gone
