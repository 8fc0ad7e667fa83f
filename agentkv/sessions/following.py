"""A request that names its session: by the id that it was given, or by a name that the client chose.

What its messages are is told by their form alone. With a system prompt or the model's own messages among them they are
the whole conversation so far; otherwise, once there has been a turn, they are new and come behind it. As long as
nothing was answered there, messages that begin with all that was appended are the whole conversation, too, and where
the session has no system prompt and no tools, it takes theirs.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from agentkv.errors import InvalidRequest, SessionBusy
from agentkv.schemas.messages import Message, identities
from agentkv.sessions.db.records import Caller, ItemRecord, LedgerConflict
from agentkv.sessions.heads import Head, behind_head
from agentkv.sessions.histories import History, messages_in, same_calls
from agentkv.sessions.recognising import Recognised, begun, branched, longest, recognised
from agentkv.sessions.rewriting import rewritten
from agentkv.sessions.session import Session

if TYPE_CHECKING:
    from agentkv.sessions.manager import Sessions

__all__ = ["by_name", "check_name", "followed", "keep", "named"]

_LONGEST_NAME = 200


async def named(sessions: Sessions, name: str, history: History, *, cache_key: str | None = None) -> Recognised:
    """Where a request is answered that names its session. ``sess_…`` is an id; any other name is the client's own, and
    its first request begins the session.

    Raises ``SessionNotFound``, ``InvalidRequest`` for what is no name or does not fit the session, and as ``create``.
    """
    if name.startswith("sess_"):
        return await followed(sessions, await sessions.get(name), history, cache_key=cache_key)
    check_name(name, "session_id")
    record = await sessions.repository.named_session(sessions.tenant, name)
    if record is None:
        try:
            return await begun(sessions, history, Caller(name=name, cache_key=cache_key))
        except InvalidRequest as error:
            record = await sessions.repository.named_session(sessions.tenant, name)
            if record is None or error.param != "id":
                raise
    return await followed(sessions, await sessions.get(record.id), history, cache_key=cache_key)


def check_name(name: str, param: str) -> None:
    """``InvalidRequest`` for what a client cannot call a session."""
    usable = name.isprintable() and not name.startswith("sess_") and name not in (".", "..")
    if not 0 < len(name) <= _LONGEST_NAME or not usable:
        raise InvalidRequest(
            f"{param}: a name has 1 to {_LONGEST_NAME} printable characters, does not begin with 'sess_', and is no "
            f"'.' or '..', got {name[:_LONGEST_NAME]!r}",
            param=param,
        )


async def by_name(sessions: Sessions, name: str) -> Session:
    """The session of that id, or that the tenant's clients call so. ``SessionNotFound`` where there is none."""
    if not name.startswith("sess_"):
        record = await sessions.repository.named_session(sessions.tenant, name)
        if record is not None:
            name = record.id
    return await sessions.get(name)


async def followed(
    sessions: Sessions, session: Session, history: History, *, cache_key: str | None = None
) -> Recognised:
    """Where in that session a request is answered, or in a fork of it: see the module."""
    await keep(sessions, session)
    record = session.record
    whole = history.filled(record)
    items = behind_head(record, await sessions.repository.items(session.id))
    unanswered = bool(items) and _unanswered(items, whole)
    if items and not history.whole and not unanswered:
        _check_head(whole, session)
        return Recognised(sessions, session, history.messages)
    if not whole.same_head(record) and (unanswered or not items) and await _begun_with(sessions, session, whole):
        record = session.record
        items = behind_head(record, await sessions.repository.items(session.id))
    if items and not history.whole:
        _check_head(whole, session)
    common = _common(items, whole.messages) if whole.same_head(record) else -1
    end = items[-1].span.stop if items else record.pinned
    elsewhere = partial(recognised, sessions, whole, cache_key=cache_key, apart=True)
    if common == len(items):
        new = same_calls(whole.messages[common:], whole.messages[:common], items)
        return Recognised(sessions, session, new, common, behind=end, elsewhere=elsewhere)
    if common == len(items) - 1 == len(whole.messages) and items[-1].generated:
        return Recognised(sessions, session, (), common, behind=end, again=True, elsewhere=elsewhere)
    known, _ = await longest(sessions, whole, cache_key)
    if known >= common:
        return await recognised(sessions, whole, cache_key=cache_key)
    caller = Caller(anonymous=True, cache_key=cache_key)
    try:
        return await branched(sessions, whole, common, session.id, items[common - 1], caller)
    except LedgerConflict as error:
        raise SessionBusy(session.id) from error


async def keep(sessions: Sessions, session: Session) -> None:
    """Somebody holds its id now: it is there until it is deleted, however long it is idle."""
    if session.record.anonymous:
        await sessions.repository.update_session(session.id, sessions.tenant, anonymous=False)
        session._core.record = replace(session._core.record, anonymous=False)


def _unanswered(items: list[ItemRecord], whole: History) -> bool:
    """Whether nothing was generated in a session, and a history begins with all that was appended to it."""
    return not any(item.generated for item in items) and _common(items, whole.messages) == len(items)


async def _begun_with(sessions: Sessions, session: Session, whole: History) -> bool:
    """Whether a session in which nothing was answered, and that has no head, has that of a history now."""
    record = session.record
    if record.system is not None or record.tools or dict(whole.template_args) != record.template_args:
        return False
    with suppress(SessionBusy):
        await rewritten(sessions, session, Head(whole.system, whole.tools, whole.system))
        return True
    return False


def _check_head(whole: History, session: Session) -> None:
    if not whole.same_head(session.record):
        raise InvalidRequest(
            f"tools: session {session.id} was begun with other tools or template arguments, which are frozen with it: "
            "leave them out, or send the whole conversation",
            param="tools",
        )


def _common(items: list[ItemRecord], said: tuple[Message, ...]) -> int:
    """How many messages of a history are the session's, from the first on."""
    stored = messages_in(items)
    pairs = zip(identities(stored), identities(said), strict=False)
    return next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(stored), len(said)))
