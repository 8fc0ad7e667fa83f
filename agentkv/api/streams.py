"""Server-sent events: a turn that streams, with heartbeats while it is silent and an event for what goes wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Generic, NamedTuple, TypeVar

from aiohttp import web
from aiohttp_sse import EventSourceResponse

from agentkv.api.calls import Call
from agentkv.api.errors import envelope
from agentkv.logs import Log, fault

__all__ = ["ServerEvent", "stream_answer", "until"]

log = Log(__name__)

E = TypeVar("E")


class ServerEvent(NamedTuple):
    """One event as it goes out: its data, and its name where it has one."""

    data: str
    name: str | None = None


class _Opening(Generic[E]):
    """Events whose first is waited for apart: until then there is no answer, and an error can be one of its own."""

    def __init__(self, events: AsyncGenerator[E]) -> None:
        self._events = events
        self._first: asyncio.Task[E] = asyncio.ensure_future(anext(events))

    async def wait(self, seconds: float) -> E | None:
        """The first event, or ``None`` where it does not come in time. Raises what the source raises."""
        try:
            await asyncio.wait([self._first], timeout=seconds)
        except asyncio.CancelledError:
            await self.cancel()
            raise
        return self._first.result() if self._first.done() else None

    async def cancel(self) -> None:
        self._first.cancel()
        await asyncio.gather(self._first, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[E]:
        try:
            yield await self._first
        except StopAsyncIteration:
            return
        async for event in self._events:
            yield event


async def stream_answer(
    call: Call,
    events: AsyncGenerator[E],
    encode: Callable[[E], Iterable[ServerEvent]],
    *,
    opened: Callable[[E], None] | None = None,
    failed: Callable[[BaseException], Iterable[ServerEvent]] | None = None,
    last: ServerEvent | None = None,
    grace: float | None = None,
) -> web.StreamResponse:
    """Answer with ``events``, each ``encode``d. ``opened`` sees the first before the headers go out, if it is in time.

    Within ``grace`` (by default the server's ``grace_seconds``) a failure is raised, and has a status; later it is an
    event: ``failed``'s, by default the envelope named ``error``. A client that goes away closes ``events``.
    """
    server = call.server
    async with aclosing(events):
        opening = _Opening(events)
        first = await opening.wait(server.grace_seconds if grace is None else grace)
        if first is not None and opened is not None:
            opened(first)
        response = EventSourceResponse(
            sep="\n",
            headers=call.headers,
            allow_all_methods=True,
            send_timeout=server.send_seconds,
            ping_interval=server.heartbeat_seconds,
        )
        try:
            await response.prepare(call.request)
            async with response:
                try:
                    async with aclosing(aiter(opening)) as source:  # type: ignore[type-var]
                        async for event in source:
                            for out in encode(event):
                                await response.send(out.data, event=out.name)
                except (ConnectionError, TimeoutError):
                    raise
                except Exception as error:
                    log.warning("stream_failed", route=call.route.path, **fault(error))
                    for out in (failed or _failed)(error):
                        await response.send(out.data, event=out.name)
                    if failed is None:
                        last = None
                if last is not None:
                    await response.send(last.data, event=last.name)
                await response.write_eof()
        except (ConnectionError, TimeoutError) as error:
            log.info("client_left", route=call.route.path, **fault(error))
        finally:
            await opening.cancel()
        return response


async def until(ended: asyncio.Event, events: AsyncIterator[E]) -> AsyncGenerator[E]:
    """``events``, until ``ended`` is set; what was being waited for is then cancelled, and has ended."""
    ending = asyncio.create_task(ended.wait())
    try:
        while True:
            following = asyncio.ensure_future(anext(events))
            try:
                await asyncio.wait({following, ending}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    return
                yield following.result()
            except StopAsyncIteration:
                return
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
    finally:
        ending.cancel()


def _failed(error: BaseException) -> Iterable[ServerEvent]:
    yield ServerEvent(json.dumps(envelope(error)[1], ensure_ascii=False), "error")
