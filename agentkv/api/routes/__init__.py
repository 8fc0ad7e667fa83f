"""The table of all calls, one file a group."""

from __future__ import annotations

from agentkv.api.calls import Route
from agentkv.api.routes import chat, operations, sessions

__all__ = ["ROUTES"]

ROUTES: tuple[Route, ...] = (*chat.routes, *sessions.routes, *operations.routes)
