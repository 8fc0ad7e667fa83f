"""The server's application: routes, and what every request passes on its way to one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import web

from agentkv.api.anonymous import expiring
from agentkv.api.auth import GUARD, Guard, guarded, tenant_of
from agentkv.api.calls import KV, SERVER, STOPPING, answered, route_of
from agentkv.api.errors import Overloaded, error_answers
from agentkv.api.openai.responding import RUNNING
from agentkv.api.openapi import DOCUMENT, document
from agentkv.api.origins import cross_origin, grant
from agentkv.api.routes import ROUTES
from agentkv.api.scratch import cleared
from agentkv.api.settings import ServerSettings
from agentkv.sessions.runtime import AgentKV

__all__ = ["make_app"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(kv: AgentKV, server: ServerSettings) -> web.Application:
    """An application over an open runtime, which it does not close."""
    app = web.Application(
        middlewares=[cross_origin, error_answers, Bound(server.max_streams).middleware, tenant_of],
        client_max_size=server.max_body,
        handler_args={"auto_decompress": False},  # a small body is not to become a large one
    )
    app[KV] = kv
    app[SERVER] = server
    app[DOCUMENT] = {keys: document(ROUTES, keys=keys) for keys in (False, True)}
    app.cleanup_ctx.append(expiring)
    app[STOPPING] = asyncio.Event()
    app[RUNNING] = {}
    app[GUARD] = Guard(kv.sessions.repository)
    app.on_startup.extend([guarded, _swept])
    app.on_response_prepare.append(grant)
    app.on_shutdown.append(_stopping)
    for route in ROUTES:
        app.router.add_route(route.method, route.path, partial(answered, route))
    for path in {route.path for route in ROUTES if "{" not in route.path}:
        app.router.add_route("*", path, partial(_not_allowed, path))
    return app


async def _not_allowed(path: str, request: web.Request) -> web.StreamResponse:
    """A path of its own hides those with a name in this place, also where it does not take the method."""
    allowed = sorted(route.method for route in ROUTES if route.path == path)
    raise web.HTTPMethodNotAllowed(request.method, allowed)


async def _swept(app: web.Application) -> None:
    await asyncio.to_thread(cleared, app[KV].settings.home)


async def _stopping(app: web.Application) -> None:
    """Whoever only watches is let go; turns have their time."""
    app[STOPPING].set()


class Bound:
    """Counts requests in progress, but for what anybody may always ask."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._running = 0

    @property
    def middleware(self) -> Any:
        """As aiohttp wants it."""

        @web.middleware
        async def bounded(request: web.Request, handler: Handler) -> web.StreamResponse:
            route = route_of(request)
            if route is None or route.scope == "open":
                return await handler(request)
            if self._running >= self._most:
                raise Overloaded(self._most)
            self._running += 1
            try:
                return await handler(request)
            finally:
                self._running -= 1

        return bounded
