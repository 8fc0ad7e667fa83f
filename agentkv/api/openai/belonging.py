"""Which session a request of OpenAI's endpoints belongs to, and how the answer says so."""

from __future__ import annotations

from agentkv.api.anonymous import MADE
from agentkv.api.calls import Call
from agentkv.api.headers import cache_header
from agentkv.schemas.replies import Begun, Event
from agentkv.sessions.following import named
from agentkv.sessions.histories import History
from agentkv.sessions.recognising import Recognised, recognised

__all__ = ["session_for", "tell", "told"]


async def session_for(call: Call, history: History, *, session_id: str | None, cache_key: str | None) -> Recognised:
    """By ``session_id``, else the header ``X-Session-ID``, else by what was said, under ``cache_key`` first; else a new
    one. Raises as ``named`` and ``recognised`` do."""
    name = session_id or call.request.headers.get("X-Session-ID") or None
    if name is not None:
        return await named(call.sessions, name, history, cache_key=cache_key or None)
    return await recognised(call.sessions, history, cache_key=cache_key or None)


def told(call: Call, found: Recognised) -> None:
    """In the answer's headers: which session it is, also where it is another one in the end; and where the history that
    was sent leaves what was said."""

    def tell_session() -> None:
        call.headers["X-AgentKV-Session"] = found.session.id

    if found.made:
        call.request.app[MADE].set()
    tell_session()
    if found.diverged is not None:
        call.headers["X-AgentKV-Diverged"] = found.diverged
    found.moved = tell_session


def tell(call: Call, event: Event) -> None:
    """In the answer's headers: what is reused, and what is computed."""
    if isinstance(event, Begun):
        call.headers["X-AgentKV-Cache"] = cache_header(event)
