"""Which web pages may call, and which names are this machine's own."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

from agentkv.api.calls import SERVER
from agentkv.api.errors import Forbidden, error_answers
from agentkv.api.headers import EXPOSED

__all__ = ["cross_origin", "is_loopback"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def cross_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Web pages may call where the settings name their origin; a browser that comes from elsewhere is refused, since
    a server on loopback may have no other guard."""
    origin = request.headers.get("Origin")
    if origin is None:
        return await handler(request)
    allowed = request.app[SERVER].cors_origins
    if origin not in allowed and "*" not in allowed and urlsplit(origin).netloc != request.headers.get("Host"):
        return await error_answers(request, _forbidden)
    granted = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
    if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
        granted["Access-Control-Allow-Methods"] = request.headers["Access-Control-Request-Method"]
        granted["Access-Control-Allow-Headers"] = request.headers.get("Access-Control-Request-Headers", "")
        granted["Access-Control-Max-Age"] = "600"
        return web.Response(status=204, headers=granted)
    request[_GRANTED] = granted
    return await handler(request)


async def grant(request: web.Request, response: web.StreamResponse) -> None:
    """Before headers go out: a page of an allowed origin may read the answer, and our headers."""
    if (granted := request.get(_GRANTED)) is not None:
        response.headers.update(granted)
        response.headers["Access-Control-Expose-Headers"] = ", ".join(EXPOSED)


_GRANTED: web.RequestKey[dict[str, str]] = web.RequestKey("granted", dict)


async def _forbidden(request: web.Request) -> web.StreamResponse:
    raise Forbidden("this origin may not call: name it in cors_origins (AGENTKV_SERVER_CORS_ORIGINS)")


def is_loopback(host: str) -> bool:
    """Whether nobody else's machine can reach it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
