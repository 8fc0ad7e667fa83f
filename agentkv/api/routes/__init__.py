"""The table of all calls, one file a group."""

from __future__ import annotations

from agentkv.api.calls import Route
from agentkv.api.routes import chat, conversations, operations, responses, sessions

__all__ = ["ROUTES"]

ROUTES: tuple[Route, ...] = (
    *chat.routes,
    *responses.routes,
    *conversations.routes,
    *sessions.routes,
    *operations.routes,
)
