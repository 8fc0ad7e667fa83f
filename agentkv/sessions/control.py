"""A look into a running process from another: its statistics and sessions, over a socket in the home folder.

The socket is its owner's alone, answers each connection with one line of JSON, and takes no orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentkv.logs import Log, fault

__all__ = ["Control", "ask"]

log = Log(__name__)

_NAME = "control.sock"
_LONGEST = 100
"""Bytes of a socket's path: systems allow 104 or 108."""


class Control:
    """Serves ``look()`` while the runtime is open. Where no socket can be made it says so in the log, and nothing else
    is different."""

    def __init__(self, home: Path, look: Callable[[], Mapping[str, Any]]) -> None:
        self._home = home
        self._look = look
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listen. A socket that a killed process left is replaced: the home's lock says that it is nobody's."""
        path = _path(self._home)
        try:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            bound = socket.socket(socket.AF_UNIX)
            try:
                bound.bind(str(path))
                path.chmod(0o600)  # nobody connects before it listens
                self._server = await asyncio.start_unix_server(self._answer, sock=bound, start_serving=False)
            except BaseException:
                bound.close()
                raise
            await self._server.start_serving()  # ``stop`` closes it by now, even if this is cancelled
        except OSError as error:
            log.info("no_control_socket", path=path, **fault(error))

    async def stop(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
            await asyncio.to_thread(_path(self._home).unlink, missing_ok=True)

    async def _answer(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(json.dumps(self._look()).encode() + b"\n")
            await writer.drain()
            writer.close()
            await writer.wait_closed()


def ask(home: Path, seconds: float = 2.0) -> dict[str, Any] | None:
    """What the process that has the home says; ``None`` where none answers. Blocking."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(seconds)
        try:
            connection.connect(str(_path(home)))
            with connection.makefile("rb") as answer:
                found: dict[str, Any] = json.loads(answer.readline())
                return found
        except (OSError, ValueError):
            return None


def _path(home: Path) -> Path:
    """In the home; under the system's temporary folder where that path is too long for a socket."""
    path = home / _NAME
    if len(os.fsencode(path)) <= _LONGEST:
        return path
    from blake3 import blake3

    return Path(tempfile.gettempdir()) / f"agentkv-{os.getuid()}-{blake3(os.fsencode(home)).hexdigest()[:16]}.sock"
