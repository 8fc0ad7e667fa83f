"""The server's application: routes, and what every request passes on its way to one."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from functools import partial
from urllib.parse import urlsplit

from aiohttp import web

from agentkv.api.anonymous import expiring
from agentkv.api.calls import KV, SERVER, TENANT, Route, Tenant, answered
from agentkv.api.errors import Forbidden, error_answers
from agentkv.api.openapi import DOCUMENT, document
from agentkv.api.routes import ROUTES
from agentkv.api.settings import ServerSettings
from agentkv.sessions.runtime import AgentKV

__all__ = ["is_loopback", "make_app"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(kv: AgentKV, server: ServerSettings) -> web.Application:
    """An application over an open runtime, which it does not close."""
    app = web.Application(
        middlewares=[cross_origin, error_answers, tenant_of],
        client_max_size=server.max_body,
        handler_args={"auto_decompress": False},
    )
    app[KV] = kv
    app[SERVER] = server
    app[DOCUMENT] = document(ROUTES)
    app.cleanup_ctx.append(expiring)
    for route in ROUTES:
        app.router.add_route(route.method, route.path, partial(answered, route))
    return app


def route_of(request: web.Request) -> Route | None:
    """The table's line that this request goes to."""
    handler = getattr(request.match_info, "handler", None)
    return handler.args[0] if isinstance(handler, partial) else None


@web.middleware
async def cross_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Web pages may call where the settings name their origin; a browser that comes from elsewhere is refused, since
    a server on loopback may have no other guard."""
    origin = request.headers.get("Origin")
    if origin is None:
        return await handler(request)
    allowed = request.app[SERVER].cors_origins
    if origin not in allowed and "*" not in allowed and urlsplit(origin).netloc != request.headers.get("Host"):
        request = request.clone()
        return await error_answers(request, _forbidden)
    granted = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
    if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
        granted["Access-Control-Allow-Methods"] = request.headers["Access-Control-Request-Method"]
        granted["Access-Control-Allow-Headers"] = request.headers.get("Access-Control-Request-Headers", "")
        granted["Access-Control-Max-Age"] = "600"
        return web.Response(status=204, headers=granted)
    request["agentkv.cors"] = granted
    return await handler(request)


async def _forbidden(request: web.Request) -> web.StreamResponse:
    raise Forbidden("this origin may not call: name it in cors_origins (AGENTKV_SERVER_CORS_ORIGINS)")


@web.middleware
async def tenant_of(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Find out whose call it is."""
    request[TENANT] = Tenant()
    return await handler(request)


def is_loopback(host: str) -> bool:
    """Whether nobody else's machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
