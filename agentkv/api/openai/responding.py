"""A response while it is made: its turn, what stops it, and where it is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from aiohttp import web

from agentkv.api.calls import Call
from agentkv.api.openai.belonging import tell
from agentkv.api.openai.response_answer import ResponseAnswer
from agentkv.api.streams import ServerEvent, until
from agentkv.schemas.replies import Done
from agentkv.schemas.sampling import SamplingParams
from agentkv.sessions.db.records import ResponseRecord
from agentkv.sessions.recognising import Recognised

__all__ = ["RUNNING", "Running", "responding"]


@dataclass(slots=True)
class Running:
    """A response in progress. ``stop``: set by who wants its end; ``ended``: set when it has."""

    tenant: str
    answer: ResponseAnswer
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


RUNNING: web.AppKey[dict[str, Running]] = web.AppKey("responses_running", dict)
"""By id."""


async def responding(
    call: Call,
    found: Recognised,
    sampling: SamplingParams,
    answer: ResponseAnswer,
    *,
    instructions: str | None,
    store: bool,
) -> AsyncGenerator[ServerEvent]:
    """Take the turn; the stream's events. With ``store`` it is kept before its last event goes out, and with the turn
    that it is the answer of: who is disconnected after the commit can retrieve it."""
    running = Running(call.tenant.name, answer)
    registry = call.request.app[RUNNING]
    registry[answer.id] = running
    found.answer_id = answer.item_id
    repository, sessions = found.sessions.repository, found.sessions

    def record(session: str | None, item: str | None) -> ResponseRecord:
        made = answer.object()
        return ResponseRecord(answer.id, sessions.tenant, session, item, instructions, made, float(made["created_at"]))

    try:
        async with aclosing(found.stream(sampling)) as turn, aclosing(until(running.stop, turn)) as events:
            async for event in events:
                tell(call, event)
                out = list(answer.events(event))
                if isinstance(event, Done) and store:
                    keeping = repository.add_response(record(event.reply.session_id, event.reply.item_id))
                    await asyncio.shield(sessions.tracked(keeping))
                for each in out:
                    yield each
                if isinstance(event, Done):
                    return
        last = list(answer.cancelled())
        if store:
            await asyncio.shield(sessions.tracked(repository.add_response(record(None, None))))
        running.ended.set()
        for each in last:
            yield each
    finally:
        registry.pop(answer.id, None)
        running.ended.set()
