"""The table of all calls, one file a group."""

from __future__ import annotations

from agentkv.api.calls import Route
from agentkv.api.routes import operations, sessions

__all__ = ["ROUTES"]

ROUTES: tuple[Route, ...] = (*sessions.routes, *operations.routes)
