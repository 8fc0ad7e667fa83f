"""Files that a request needs for as long as it lasts: a session on its way out or in."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentkv.api.calls import Call

__all__ = ["cleared", "scratch"]

_FOLDER = "transfers"


@asynccontextmanager
async def scratch(call: Call) -> AsyncIterator[Path]:
    """A folder of its own in the home, deleted at the end. Nothing here blocks the loop."""
    made = await asyncio.to_thread(_made, call.kv.settings.home)
    try:
        yield made
    finally:
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, made, ignore_errors=True))


def cleared(home: Path) -> None:
    """What a server that was killed has left is deleted. Blocking."""
    shutil.rmtree(home / _FOLDER, ignore_errors=True)


def _made(home: Path) -> Path:
    parent = home / _FOLDER
    parent.mkdir(mode=0o700, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=parent))
