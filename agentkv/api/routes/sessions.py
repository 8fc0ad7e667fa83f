"""``/v1/sessions``: conversations with a name, as the SDK has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from agentkv.api import bodies
from agentkv.api.calls import STOPPING, Call, Routes, adapter
from agentkv.api.headers import cache_header
from agentkv.api.scratch import scratch
from agentkv.api.streams import ServerEvent, stream_answer, until
from agentkv.errors import ImportRefused, InvalidRequest, SessionNotFound
from agentkv.schemas.replies import Begun, Done, Event, Item, Reply, SessionInfo, TextDelta, ToolCallEvent
from agentkv.sessions.branching import RewindReport
from agentkv.sessions.db.records import Caller, SessionRecord
from agentkv.sessions.events import LifecycleEvent
from agentkv.sessions.following import by_name, check_name, keep
from agentkv.sessions.hints import HintOutcome
from agentkv.sessions.session import Session
from agentkv.sessions.verifying import Verification
from agentkv.types import ImportReport, RestoreReport, SuspendReport

__all__ = ["routes"]

routes = Routes("Sessions")
_PART = 1 << 20
"""Bytes of a file that are read or written at once."""


@routes.post("/v1/sessions", body=bodies.SessionCreate, body_optional=True, answer=bodies.Created, status=201)
async def create_session(call: Call) -> bodies.Created:
    """Begin a conversation.

    System prompt, tools and template arguments are frozen with it; its KV is kept for as long as it exists."""
    given = {name: getattr(call.body, name) for name in call.body.model_fields_set}
    name = given.pop("name", None)
    if name is not None:
        check_name(name, "name")
        if await call.sessions.repository.named_session(call.sessions.tenant, name) is not None:
            raise InvalidRequest(f"name: there is a session {name!r} already", param="name")
        given["caller"] = Caller(name=name)
    return _created(await call.sessions.create(**given))


@routes.get("/v1/sessions", query=bodies.ListQuery, answer=bodies.SessionPage)
async def list_sessions(call: Call) -> bodies.SessionPage:
    """List sessions, newest first."""
    query = call.query
    try:
        found = await call.sessions.list(agent_id=query.agent_id, limit=query.limit + 1, before=query.before)
    except SessionNotFound:
        raise InvalidRequest(f"before: there is no session {query.before!r}", param="before") from None
    page = found[: query.limit]
    return bodies.SessionPage(
        data=[_summary(record) for record in page],
        has_more=len(found) > len(page),
        last_id=page[-1].id if page else None,
    )


@routes.get("/v1/sessions/{session_id}", answer=SessionInfo, errors=(404,))
async def get_session(call: Call) -> SessionInfo:
    """Say where a session is and what it weighs.

    Which spans of its ledger its policy keeps, item by item, and the bytes of each tier."""
    return await (await _session(call)).state()


@routes.get("/v1/sessions/{session_id}/state", answer=SessionInfo, errors=(404,))
async def get_session_state(call: Call) -> SessionInfo:
    """Say the same by its longer name."""
    return await get_session(call)


@routes.patch("/v1/sessions/{session_id}", body=bodies.SessionPatch, answer=SessionInfo, errors=(404, 409))
async def update_session(call: Call) -> SessionInfo:
    """Change a session's policy, agent or metadata."""
    session, given = await _session(call), call.body.model_fields_set
    if "policy" in given and call.body.policy is not None:
        await session.set_policy(call.body.policy)
    named = {name: getattr(call.body, name) for name in ("agent_id", "metadata") if name in given}
    if named:
        await session.update(**named)
    return await session.state()


@routes.delete("/v1/sessions/{session_id}", answer=bodies.Deleted, errors=(404,))
async def delete_session(call: Call) -> bodies.Deleted:
    """Delete a session and the files that no other needs."""
    session = await by_name(call.sessions, call.path("session_id"))
    return bodies.Deleted(id=session.id, freed_bytes=await call.sessions.delete(session.id))


@routes.get("/v1/sessions/{session_id}/items", answer=bodies.ItemPage, errors=(404,))
async def list_session_items(call: Call) -> bodies.ItemPage:
    """List a session's items, the system prompt first."""
    return bodies.ItemPage.model_construct(data=await (await _session(call)).items())


@routes.post(
    "/v1/sessions/{session_id}/messages",
    body=bodies.SendBody,
    answer=Reply | list[Item],
    events=Event,
    tells=("X-AgentKV-Session", "X-AgentKV-Cache"),
    errors=(404, 409),
)
async def send_messages(call: Call) -> Any:
    """Take a turn: add messages and generate the reply.

    The answer is the committed reply. With `stream` it comes as events: `begun` (what is reused and what is computed),
    `delta`, `tool_call`, `done` (the committed reply), and `error`. Whoever disconnects before it is committed has it
    rolled back. With `generate: false` the messages are committed and nothing is generated: the answer is their items.
    """
    session, body = await _session(call), call.body
    call.headers["X-AgentKV-Session"] = session.id
    if not body.generate:
        if body.messages is None:
            raise InvalidRequest("messages: there is nothing to append", param="messages")
        if body.stream or body.sampling():
            raise InvalidRequest("generate: false takes neither stream nor sampling parameters", param="generate")
        return await session.append(body.messages, wait=body.wait)
    if body.messages is None:
        events = session.stream_continue(wait=body.wait, begun=True, **body.sampling())
    else:
        events = session.stream(body.messages, wait=body.wait, begun=True, **body.sampling())
    if body.stream:
        return await stream_answer(call, events, _encoded, opened=lambda first: _tell(call, first))
    async with aclosing(events):
        async for event in events:
            _tell(call, event)
            if isinstance(event, Done):
                return event.reply
    raise AssertionError("a turn ends with Done or an error")


@routes.post(
    "/v1/sessions/{session_id}/regenerate",
    body=bodies.Sampling,
    body_optional=True,
    answer=Reply,
    errors=(404, 409),
)
async def regenerate_answer(call: Call) -> Reply:
    """Make the last answer again, in its place."""
    return await (await _session(call)).regenerate(**call.body.sampling())


@routes.post(
    "/v1/sessions/{session_id}/suspend",
    body=bodies.SuspendBody,
    body_optional=True,
    answer=SuspendReport,
    errors=(404,),
)
async def suspend_session(call: Call) -> SuspendReport:
    """Take the KV off the device, to host memory or disk."""
    return await (await _session(call)).suspend(call.body.tier)


@routes.post(
    "/v1/sessions/{session_id}/resume", body=bodies.NoBody, body_optional=True, answer=RestoreReport, errors=(404,)
)
async def resume_session(call: Call) -> RestoreReport:
    """Bring the KV back to the device now, so that the next turn need not."""
    return await (await _session(call)).resume()


@routes.post(
    "/v1/sessions/{session_id}/fork",
    body=bodies.ForkBody,
    body_optional=True,
    answer=bodies.Created,
    status=201,
    errors=(404,),
)
async def fork_session(call: Call) -> bodies.Created:
    """Begin a new session with this one's items.

    No KV is copied. During a turn it begins with what was committed before."""
    given = {name: getattr(call.body, name) for name in call.body.model_fields_set}
    return _created(await (await _session(call)).fork(**given))


@routes.post("/v1/sessions/{session_id}/rewind", body=bodies.RewindBody, answer=RewindReport, errors=(404, 409))
async def rewind_session(call: Call) -> RewindReport:
    """Go back to an item, or by some turns: what came later is gone.

    `dry_run` says what the next turn would have to compute, and changes nothing."""
    body = call.body
    return await (await _session(call)).rewind(body.to_item, turns=body.turns, dry_run=body.dry_run)


@routes.post("/v1/sessions/{session_id}/hints", body=bodies.HintBody, answer=HintOutcome, errors=(404,))
async def hint_session(call: Call) -> HintOutcome:
    """Say what is known of a session's future: when it is wanted, that it must stay, that it rests."""
    session, kind, seconds = await _session(call), call.body.kind, call.body.seconds
    if (kind in ("expect", "pin")) != (seconds is not None):
        wanted = "takes seconds" if seconds is None else "takes no seconds"
        raise InvalidRequest(f"seconds: the hint {kind!r} {wanted}", param="seconds")
    if kind == "expect":
        return await session.expect(seconds)
    if kind == "pin":
        return await session.pin(seconds)
    return await (session.prefetch() if kind == "prefetch" else session.close())


@routes.get("/v1/sessions/{session_id}/events", events=LifecycleEvent, errors=(404,))
async def watch_session(call: Call) -> web.StreamResponse:
    """Watch what happens to a session's KV, as server-sent events.

    Restored, demoted, evicted, fallback …, from now on until the client leaves or the server stops."""
    session = await _session(call)

    async def own() -> AsyncGenerator[LifecycleEvent]:
        async for event in until(call.request.app[STOPPING], call.kv.events()):
            if event.session_id == session.id:
                yield event
                if event.kind == "deleted":
                    return

    def encoded(event: LifecycleEvent) -> Iterator[ServerEvent]:
        yield ServerEvent(adapter(LifecycleEvent).dump_json(event).decode(), event.kind)

    return await stream_answer(call, own(), encoded, grace=0.0)


@routes.post(
    "/v1/sessions/{session_id}/verify",
    body=bodies.VerifyBody,
    body_optional=True,
    answer=Verification,
    errors=(404,),
)
async def verify_session(call: Call) -> Verification:
    """Check every stored byte of a session, and compute some of it again to compare."""
    return await (await _session(call)).verify(tokens=call.body.tokens)


@routes.get(
    "/v1/sessions/{session_id}/export",
    media="application/octet-stream",
    tells=("Content-Disposition",),
    errors=(404,),
)
async def export_session(call: Call) -> web.StreamResponse:
    """Download a session with its KV as one checked file, which `/v1/sessions/import` takes elsewhere."""
    session = await _session(call)
    async with scratch(call) as folder:
        path = folder / "session.akv"
        report = await session.export(path)
        response = web.StreamResponse(headers=call.headers)
        response.content_type = "application/octet-stream"
        response.content_length = report.nbytes
        response.headers["Content-Disposition"] = f'attachment; filename="{session.id}.akv"'
        await response.prepare(call.request)
        with await asyncio.to_thread(path.open, "rb") as file:
            while part := await asyncio.to_thread(file.read, _PART):
                await response.write(part)
        await response.write_eof()
        return response


@routes.post(
    "/v1/sessions/import",
    body=bytes,
    body_media="application/octet-stream",
    answer=ImportReport,
    status=201,
    errors=(413,),
)
async def import_session(call: Call) -> ImportReport:
    """Take in a session that was exported elsewhere, as a new one.

    All of the file is checked before anything is kept. Where the model is another one it comes without KV, which its
    next turn computes."""
    largest = call.server.max_import
    async with scratch(call) as folder:
        path = folder / "session.akv"
        size = 0
        with await asyncio.to_thread(path.open, "wb") as file:
            async for part in call.request.content.iter_chunked(_PART):
                size += len(part)
                if size > largest:
                    raise web.HTTPRequestEntityTooLarge(max_size=largest, actual_size=size)
                await asyncio.to_thread(file.write, part)
        try:
            session = await call.sessions.import_(path)
        except ImportRefused as refused:  # where it lay here is nobody's business
            raise ImportRefused("the uploaded file", refused.reason, refused.detail) from None
    assert session.imported is not None
    return session.imported


def _tell(call: Call, event: Event) -> None:
    if isinstance(event, Begun):
        call.headers["X-AgentKV-Cache"] = cache_header(event)


_NAMES: dict[type[Any], str] = {Begun: "begun", TextDelta: "delta", ToolCallEvent: "tool_call", Done: "done"}


def _encoded(event: Event) -> Iterator[ServerEvent]:
    kind: Any = type(event)
    yield ServerEvent(adapter(kind).dump_json(event).decode(), _NAMES[kind])


async def _session(call: Call) -> Session:
    session = await by_name(call.sessions, call.path("session_id"))
    if call.route.method != "GET":
        await keep(call.sessions, session)
    return session


def _created(session: Session) -> bodies.Created:
    record = session.record
    return bodies.Created(
        id=record.id,
        agent_id=record.agent_id,
        parent_id=record.parent_id,
        policy=record.policy,
        ledger_tokens=record.ledger_length,
        metadata=record.metadata,
    )


def _summary(record: SessionRecord) -> bodies.SessionSummary:
    return bodies.SessionSummary(
        id=record.id,
        agent_id=record.agent_id,
        model=record.model,
        policy=record.policy,
        turns=record.turns,
        ledger_tokens=record.ledger_length,
        created_at=record.created_at,
        updated_at=record.updated_at,
        metadata=record.metadata,
    )
