"""``agentkv serve``: a runtime and its server, from the first line printed to the last turn finished."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable

from aiohttp import web

from agentkv.api.app import make_app
from agentkv.api.auth import GUARD
from agentkv.api.origins import is_loopback
from agentkv.api.settings import ServerSettings
from agentkv.errors import InvalidRequest
from agentkv.logs import Log
from agentkv.sessions.runtime import AgentKV
from agentkv.settings import Settings

__all__ = ["serve"]

log = Log(__name__)


async def serve(settings: Settings, server: ServerSettings, *, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, then let running turns finish for ``shutdown_seconds``, write all KV, return.

    ``ready`` gets the URL once requests are answered. Raises what opening the runtime raises, and ``InvalidRequest``
    where the address cannot be listened on.
    """
    for name, meant in server.unknown_variables().items():
        log.warning("unknown_variable", name=name, meant=meant)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        async with AgentKV(settings) as kv:
            app = make_app(kv, server)
            if not is_loopback(server.host) and not await app[GUARD].locked():
                raise InvalidRequest(
                    f"host {server.host} can be reached from other machines and there is no key: make one with "
                    "`agentkv keys create NAME`, or listen on 127.0.0.1",
                    param="host",
                )
            runner = web.AppRunner(
                app,
                handler_cancellation=True,
                shutdown_timeout=server.shutdown_seconds,
                access_log=None,
                keepalive_timeout=75.0,
            )
            await runner.setup()
            try:
                site = web.TCPSite(runner, server.host, server.port)
                try:
                    await site.start()
                except OSError as error:
                    raise InvalidRequest(
                        f"cannot listen on {server.host}:{server.port}: {error.strerror or error}; try another --port",
                        param="port",
                    ) from error
                ready(_url(runner, server.host))
                await stop.wait()
                log.info("stopping", seconds=server.shutdown_seconds)
            finally:
                await runner.cleanup()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):
                loop.remove_signal_handler(number)


def _url(runner: web.AppRunner, host: str) -> str:
    port = runner.addresses[0][1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
