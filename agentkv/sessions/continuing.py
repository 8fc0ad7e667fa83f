"""Requests that say what they go on from: a response, or a conversation.

::

    r1 ── r2 ── r3          behind r3, at the end of its idle session: it goes on
           └─ …             behind r2, or where a turn is running: a fork of it does

What a request leaves unsaid of the head (instructions, tools) is what the session has. Where it says something else, a
response is gone on from in a session that begins so, found by what was said or made for it; a conversation, which is a
session, is said anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from agentkv.errors import InvalidRequest, ResponseNotFound, SessionBusy, SessionNotFound
from agentkv.schemas.messages import Message
from agentkv.sessions.db.records import Caller, ItemRecord, LedgerConflict, ResponseRecord, SessionRecord
from agentkv.sessions.following import keep
from agentkv.sessions.heads import Head, behind_head, joined
from agentkv.sessions.histories import History
from agentkv.sessions.recognising import Recognised, recognised
from agentkv.sessions.rewriting import rewritten
from agentkv.sessions.session import Session

if TYPE_CHECKING:
    from agentkv.sessions.manager import Sessions

__all__ = [
    "Context",
    "NewItems",
    "Wanted",
    "beside",
    "conversation_context",
    "conversed",
    "responded",
    "response_context",
]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request says of the head; ``None``: nothing. No tools are ``()``."""

    instructions: str | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None

    def head(self, record: SessionRecord, replaced: str | None) -> Head:
        """For what goes on from ``record``, whose system prompt begins with the instructions ``replaced``."""
        tools = (tuple(record.tools) if record.tools else ()) if self.tools is None else self.tools
        system = record.system
        if self.instructions is None:
            return Head(system, tools or None, replaced)
        if self.instructions.strip() != (system or "").strip():
            system = joined(self.instructions, beside(system, replaced))
        return Head(system, tools or None, self.instructions)


@dataclass(frozen=True, slots=True)
class NewItems(History):
    """A response's input where its instructions are all that it says of a system prompt: with answers among it, it is a
    whole conversation."""

    @property
    def whole(self) -> bool:
        """Whether it can only be a whole conversation."""
        return any(message.role == "assistant" for message in self.messages)


@dataclass(frozen=True, slots=True)
class Context:
    """What a request goes on from: ``items``, the head's included, of ``session``, under ``head``."""

    session: Session
    items: list[ItemRecord]
    head: Head

    @property
    def messages(self) -> list[Message]:
        """What was said behind the head. ``InvalidRequest`` for raw tokens."""
        said = behind_head(self.session.record, self.items)
        if any(item.kind == "tokens" for item in said):
            raise InvalidRequest(f"session {self.session.id} holds raw tokens, which cannot be said anew")
        return [Message.from_canonical(item.content) for item in said]

    @property
    def bare(self) -> bool:
        """Whether nothing was said but the head."""
        return not behind_head(self.session.record, self.items)

    def check(self, new: Sequence[Message]) -> None:
        """``InvalidRequest`` where there is nothing to answer."""
        if not new and (not self.messages or self.messages[-1].role == "assistant"):
            raise InvalidRequest("input: there is nothing to answer; pass a text or a list of items", param="input")


def beside(system: str | None, instructions: str | None) -> str | None:
    """What of a system prompt is no instructions: it was said as a message, and stays where those are replaced."""
    if not system or not instructions:
        return system or None
    return system.removeprefix(instructions).strip() or None if system.strip() != instructions.strip() else None


async def response_context(sessions: Sessions, response: ResponseRecord, wanted: Wanted) -> Context:
    """All up to a response. ``InvalidRequest`` where its session does not hold it any more."""
    if response.session_id is None:
        raise InvalidRequest(
            f"previous_response_id: response {response.id} was cancelled: there is nothing to go on from",
            param="previous_response_id",
        )
    try:
        session = await sessions.get(response.session_id)
    except SessionNotFound:
        raise ResponseNotFound(response.id) from None
    items = await sessions.repository.items(session.id)
    count = next((count for count, item in enumerate(items, 1) if item.id == response.item_id), 0)
    if not count:
        raise InvalidRequest(
            f"previous_response_id: session {session.id} has gone back behind response {response.id}, or deleted its "
            "item: send the conversation as input",
            param="previous_response_id",
        )
    return Context(session, items[:count], wanted.head(session.record, response.instructions))


async def conversation_context(sessions: Sessions, session_id: str, wanted: Wanted) -> Context:
    """All of a conversation. Raises ``SessionNotFound``."""
    session = await sessions.get(session_id)
    items = await sessions.repository.items(session.id)
    return Context(session, items, wanted.head(session.record, session.record.instructions))


async def responded(
    sessions: Sessions, context: Context, new: Sequence[Message], *, cache_key: str | None = None
) -> Recognised:
    """Where ``new`` is answered behind a response. Raises as ``Sessions.create`` and ``Sessions.fork``."""
    context.check(new)
    session, head, last = context.session, context.head, context.items[-1]
    if not head.same(session.record):
        history = History(
            (*context.messages, *new),
            head.system,
            tuple(map(dict, head.tools or ())) or None,
            session.record.template_args,
        )
        return await recognised(sessions, history, cache_key=cache_key)
    elsewhere = partial(_forked, sessions, session, last.id, new, cache_key)
    record, core = session.record, session._core
    if last.span.stop != record.ledger_length or core.turns:
        return await elsewhere()
    return Recognised(sessions, session, tuple(new), behind=last.span.stop, elsewhere=elsewhere)


async def conversed(sessions: Sessions, context: Context, new: Sequence[Message]) -> Recognised:
    """Where ``new`` is answered in a conversation: there. Raises as ``rewritten`` does."""
    context.check(new)
    session, head = context.session, context.head
    await keep(sessions, session)
    if not head.same(session.record):
        await rewritten(sessions, session, head)
    return Recognised(sessions, session, tuple(new))


async def _forked(
    sessions: Sessions, session: Session, item: str, new: Sequence[Message], cache_key: str | None
) -> Recognised:
    caller = Caller(anonymous=True, cache_key=cache_key)
    try:
        fork = await sessions.fork(session._core, item, caller=caller)
    except LedgerConflict as error:
        raise SessionBusy(session.id) from error
    return Recognised(sessions, fork, tuple(new), made=True, behind=fork.record.ledger_length)
