"""What a call to the server is: the table of all that it answers, and one request on its way to its handler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from aiohttp import web
from pydantic import BaseModel, TypeAdapter, ValidationError

from agentkv.api.errors import BodyTimeout, Encoded, NotJSON, invalid
from agentkv.api.settings import ServerSettings
from agentkv.errors import InvalidRequest

if TYPE_CHECKING:
    from agentkv.sessions.manager import Sessions
    from agentkv.sessions.runtime import AgentKV

__all__ = ["KV", "SERVER", "STOPPING", "TENANT", "Call", "Route", "Routes", "Tenant", "adapter", "answered", "route_of"]

KV: web.AppKey[AgentKV] = web.AppKey("kv")
STOPPING = web.AppKey("stopping", asyncio.Event)
SERVER = web.AppKey("server", ServerSettings)
TENANT: web.RequestKey[Tenant] = web.RequestKey("tenant")

_LARGE = 256 * 1024
"""Bytes of a body from which on it is read in a thread: a millisecond of parsing."""


class _NoQuery(BaseModel):
    """Nothing can be asked for."""


Handler = Callable[["Call"], Awaitable[Any]]
H = TypeVar("H", bound=Handler)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose call it is. ``admin``: whether it may ask about the whole server."""

    name: str = "default"
    admin: bool = True


@dataclass(frozen=True, slots=True)
class Route:
    """One line of the table.

    ``body``, ``answer``: types that pydantic reads and writes (``None``: there is none); ``query``: a model of the
    query string. ``events``: the type of a stream's events, where the call can be answered by one; ``last``:
    what it ends with, where that is no event. ``reads``, ``tells``: headers of its own that it reads, and that its
    answer has: names of ``headers.REQUEST`` and ``headers.ANSWER``. ``errors``: statuses it can end with beside those
    that any call can. ``scope``: ``open`` needs no key, ``admin`` an admin's.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    description: str
    tag: str
    body: Any = None
    query: type[BaseModel] | None = None
    answer: Any = None
    events: Any = None
    last: str | None = None
    reads: tuple[str, ...] = ()
    tells: tuple[str, ...] = ()
    status: int = 200
    errors: tuple[int, ...] = ()
    media: str = "application/json"
    body_media: str = "application/json"
    body_optional: bool = False
    scope: Literal["open", "key", "admin"] = "key"

    @property
    def operation(self) -> str:
        """Its ``operationId``."""
        return self.handler.__name__.strip("_")


@dataclass(slots=True)
class Routes:
    """Routes with one tag, declared by decorators. The handler's docstring is summary and description."""

    tag: str
    routes: list[Route] = field(default_factory=list)

    def __iter__(self) -> Iterator[Route]:
        return iter(self.routes)

    def add(self, method: str, path: str, **facts: Any) -> Callable[[H], H]:
        def declare(handler: H) -> H:
            summary, _, description = (handler.__doc__ or "").strip().partition("\n\n")
            self.routes.append(
                Route(
                    method, path, handler, " ".join(summary.split()), " ".join(description.split()), self.tag, **facts
                )
            )
            return handler

        return declare

    def get(self, path: str, **facts: Any) -> Callable[[H], H]:
        return self.add("GET", path, **facts)

    def post(self, path: str, **facts: Any) -> Callable[[H], H]:
        return self.add("POST", path, **facts)

    def patch(self, path: str, **facts: Any) -> Callable[[H], H]:
        return self.add("PATCH", path, **facts)

    def delete(self, path: str, **facts: Any) -> Callable[[H], H]:
        return self.add("DELETE", path, **facts)


@dataclass(slots=True)
class Call:
    """One request, checked: ``body`` and ``query`` are what the route declares."""

    request: web.Request
    route: Route
    body: Any = None
    query: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    """Of the answer."""

    @property
    def kv(self) -> AgentKV:
        """The runtime."""
        return self.request.app[KV]

    @property
    def server(self) -> ServerSettings:
        """The server's settings."""
        return self.request.app[SERVER]

    @property
    def tenant(self) -> Tenant:
        """Whose call it is."""
        return self.request[TENANT]

    @property
    def sessions(self) -> Sessions:
        """The tenant's sessions."""
        return self.kv.tenant(self.tenant.name)

    def path(self, name: str) -> str:
        """A part of the path."""
        return self.request.match_info[name]


def route_of(request: web.Request) -> Route | None:
    """The table's line that this request goes to."""
    handler = getattr(request.match_info, "handler", None)
    return handler.args[0] if isinstance(handler, partial) and isinstance(handler.args[0], Route) else None


@cache
def adapter(type_: Any) -> TypeAdapter[Any]:
    """Reads and writes values of a type; made once."""
    return TypeAdapter(type_)


async def answered(route: Route, request: web.Request) -> web.StreamResponse:
    """Read the request, call the handler, write what it returns."""
    call = Call(request, route)
    if route.query is not None or route.scope != "open":
        call.query = _query(route.query or _NoQuery, request)
    if route.body is not None and (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
        raise Encoded(encoding)
    if route.body is not None and route.body_media == "application/json":
        call.body = await _body(route, request)
    result = await route.handler(call)
    if isinstance(result, web.StreamResponse):
        return result
    if route.answer is None:
        return web.Response(status=204, headers=call.headers)
    text = adapter(route.answer).dump_json(result, by_alias=True)
    return web.Response(body=text, status=route.status, content_type="application/json", headers=call.headers)


async def _body(route: Route, request: web.Request) -> Any:
    try:
        async with asyncio.timeout(request.app[SERVER].body_seconds):
            raw = await request.read()
    except TimeoutError:
        raise BodyTimeout(request.app[SERVER].body_seconds) from None
    if not raw:
        if route.body_optional:
            raw = b"{}"
        else:
            raise NotJSON("the body is empty")
    reads = partial(adapter(route.body).validate_json, strict=True)
    try:
        return await asyncio.to_thread(reads, raw) if len(raw) > _LARGE else reads(raw)
    except ValidationError as error:
        raise invalid(error) from None
    except RecursionError:
        raise NotJSON("it is nested too deeply") from None


def _query(model: type[BaseModel], request: web.Request) -> BaseModel:
    given: dict[str, Any] = {}
    for name in request.query:
        values = request.query.getall(name)
        if name not in model.model_fields:
            raise InvalidRequest(
                f"{name}: unknown query parameter; known: {', '.join(model.model_fields) or 'none'}", param=name
            )
        if len(values) > 1:
            raise InvalidRequest(f"{name}: given {len(values)} times; once is enough", param=name)
        given[name] = values[0]
    try:
        return model.model_validate_strings(given)
    except ValidationError as error:
        raise invalid(error) from None
