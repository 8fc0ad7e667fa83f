"""Which session a request belongs to, where its client sends the whole conversation each time.

::

    history:   m1 ── m2 ── m3 ── m4           the longest beginning that some session of the tenant has is a node
    stored:    m1 ── m2 ── m3                 at the end of an idle anonymous session: it goes on
                      └── m3'                 elsewhere, or where a turn is running: a fork of it does

A session that somebody holds the id of is forked here and never gone on with: what is said in it is up to its owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from agentkv.errors import AgentKVError, Closed, InvalidRequest, LimitExceeded, SessionBusy, SessionNotFound
from agentkv.logs import Log
from agentkv.schemas.messages import Message
from agentkv.schemas.replies import Event
from agentkv.schemas.sampling import SamplingParams
from agentkv.sessions.chains import digests, root_of
from agentkv.sessions.db.records import Caller, ItemRecord, LedgerConflict, Node
from agentkv.sessions.diverging import diverged
from agentkv.sessions.entering import TurnInput
from agentkv.sessions.histories import History, same_calls
from agentkv.sessions.session import Session

if TYPE_CHECKING:
    from agentkv.sessions.manager import Sessions

__all__ = ["Recognised", "begun", "branched", "longest", "recognised", "renamed"]

log = Log(__name__)

_CANDIDATES = 8
_ATTEMPTS = 5
"""Sessions are deleted and written while they are looked at: then it is looked again."""


@dataclass(slots=True)
class Recognised:
    """Where a request is answered: ``new`` messages behind the first ``matched`` of its history. Without any it is
    answered as it stands there.

    ``session``: which answers; another one once ``stream`` has found it busy. ``made``: for this request alone.
    ``behind``: length of the ledger that it goes on from. ``again``: the answer takes the place of the last one.
    ``elsewhere``: where else it can be answered; ``None``: nowhere. ``moved`` is called where it is.
    ``answer_id``: of the answer's item, where it is to have one that is known before. ``diverged``: where the history
    leaves what was said, as ``diverging.diverged`` says it.
    """

    sessions: Sessions
    session: Session
    new: tuple[Message, ...]
    matched: int = 0
    made: bool = False
    behind: int | None = None
    again: bool = False
    elsewhere: Callable[[], Awaitable[Recognised]] | None = field(default=None, repr=False)
    moved: Callable[[], object] | None = field(default=None, repr=False)
    answer_id: str | None = None
    diverged: str | None = None

    async def stream(self, sampling: SamplingParams) -> AsyncGenerator[Event]:
        """Take the turn; events as those of ``Session.stream``, a ``Begun`` first. Raises as it does, ``SessionBusy``
        only where it can be answered nowhere else. Where nothing is committed, a session made for it is deleted."""
        started = False
        try:
            try:
                async with aclosing(self._turn(sampling)) as events:
                    async for event in events:
                        started = True
                        yield event
            except (SessionBusy, Closed) as error:
                gone = isinstance(error, Closed) and self.session._core.deleted
                if started or self.elsewhere is None or not (gone or isinstance(error, SessionBusy)):
                    raise
                other = await self.elsewhere()
                self.session, self.new, self.matched = other.session, other.new, other.matched
                self.made, self.behind, self.again, self.elsewhere = other.made, other.behind, other.again, None
                if self.moved is not None:
                    self.moved()
                async with aclosing(self._turn(sampling)) as events:
                    async for event in events:
                        yield event
        finally:
            if self.made and self.session.record.ledger_length == self.behind:
                await asyncio.shield(self.sessions.tracked(self._forget()))

    async def _turn(self, sampling: SamplingParams) -> AsyncGenerator[Event]:
        kind: Any = "send" if self.new else "continue"
        request = TurnInput(
            kind, self.new, sampling=sampling, again=self.again, behind=self.behind, answer_id=self.answer_id
        )
        async with aclosing(self.sessions.run(self.session._core, request, False)) as events:
            async for event in events:
                yield event  # type: ignore[misc]

    async def _forget(self) -> None:
        with suppress(AgentKVError):  # what went wrong with the turn is told; nobody else is waiting for this
            await self.session.delete()


async def recognised(
    sessions: Sessions, history: History, *, cache_key: str | None = None, apart: bool = False
) -> Recognised:
    """Where a whole conversation is answered whose client holds no id, and why it is not where the client may think.

    ``cache_key``: what the client calls its requests: a session under the same key whose end is such a beginning goes
    on, and none under another key. ``apart``: none at all. Raises as ``Sessions.create``.
    """
    found = await _found(sessions, history, cache_key, apart)
    found.diverged = await diverged(sessions, history, found.matched)
    if found.diverged is not None:
        log.info("diverged", session=found.session.id, where=found.diverged, matched=found.matched)
    return found


async def _found(sessions: Sessions, history: History, cache_key: str | None, apart: bool) -> Recognised:
    caller = Caller(anonymous=True, cache_key=cache_key)
    for _ in range(_ATTEMPTS):
        if cache_key is not None and not apart:
            matched, nodes = await longest(sessions, history, cache_key, mine=True)
            if found := await _in_place(sessions, history, matched, nodes, cache_key):
                return found
        matched, nodes = await longest(sessions, history, cache_key)
        try:
            if not nodes:
                return await begun(sessions, history, caller)
            if not apart and (found := await _in_place(sessions, history, matched, nodes, cache_key)):
                return found
            return await branched(sessions, history, matched, nodes[0].session.id, nodes[0].item, caller)
        except (SessionNotFound, LedgerConflict):
            continue
        except LimitExceeded:
            if not await _made_room(sessions):
                raise
    return await begun(sessions, history, caller)


async def longest(
    sessions: Sessions, history: History, cache_key: str | None, *, mine: bool = False
) -> tuple[int, list[Node]]:
    """How many of its messages some session has, and where: the best places first. ``mine``: sessions under the key."""
    start = sessions.root(history)
    chains = digests(start, history.messages)
    repository, tenant = sessions.repository, sessions.tenant
    while chains:
        matched = await repository.longest_chain(tenant, chains, cache_key if mine else None)
        if not matched:
            break
        found = await repository.nodes(tenant, chains[matched - 1], cache_key, _CANDIDATES)
        nodes = [node for node in found if root_of(node.session) == start]
        if mine:
            nodes = [node for node in nodes if node.session.cache_key == cache_key]
        if nodes:
            return matched, nodes
        chains = chains[: matched - 1]  # these have another policy or model by now
    return 0, []


async def begun(sessions: Sessions, history: History, caller: Caller) -> Recognised:
    """A new session for all of it."""
    session = await sessions.create(
        history.system, tools=history.tools, template_args=history.template_args, caller=caller
    )
    return Recognised(sessions, session, history.messages, made=True, behind=session.record.ledger_length)


async def branched(
    sessions: Sessions, history: History, matched: int, source: str, item: ItemRecord, caller: Caller
) -> Recognised:
    """A fork of ``source`` behind ``item``, with which the first ``matched`` messages end.

    Raises ``LedgerConflict`` or ``SessionNotFound`` where it is not there any more.
    """
    core = (await sessions.get(source))._core
    new = await renamed(sessions, source, item.seq, history, matched)
    try:
        fork = await sessions.fork(core, item.id, caller=caller)
    except InvalidRequest as error:
        raise LedgerConflict(f"session {source} has gone back behind item {item.id}") from error
    return Recognised(sessions, fork, new, matched, made=True, behind=fork.record.ledger_length)


async def renamed(sessions: Sessions, source: str, last: int, history: History, matched: int) -> tuple[Message, ...]:
    """The messages behind the first ``matched``, naming calls as the session does, up to its item number ``last``."""
    new, said = history.messages[matched:], history.messages[:matched]
    answered = {message.tool_call_id for message in new if message.tool_call_id is not None}
    earlier = {call.id for message in said for call in message.tool_calls} & answered
    core = next((core for core in sessions.cores() if core.id == source), None)
    if not earlier or (core is not None and core.ledger is not None and earlier <= core.calls.keys()):
        return new
    items = await sessions.repository.items(source)
    return same_calls(new, said, [item for item in items if item.seq <= last])


async def _in_place(
    sessions: Sessions, history: History, matched: int, nodes: Sequence[Node], cache_key: str | None
) -> Recognised | None:
    """At the end of an idle session that nobody holds the id of; ``None`` where there is none."""
    cores = {core.id: core for core in sessions.cores()}
    for node in nodes:
        core, end = cores.get(node.session.id), node.item.span.stop
        idle = core is None or not (core.turns or core.deleted or core.record.ledger_length != end)
        if node.head and idle and node.session.anonymous and cache_key in (None, node.session.cache_key):
            session = await sessions.get(node.session.id)
            new = await renamed(sessions, session.id, node.item.seq, history, matched)
            elsewhere = partial(recognised, sessions, history, cache_key=cache_key, apart=True)
            return Recognised(sessions, session, new, matched, behind=end, elsewhere=elsewhere)
    return None


async def _made_room(sessions: Sessions) -> bool:
    """Whether a session that nobody holds the id of gave way, the one idle for longest: the tenant may have no more."""
    busy = {core.id for core in sessions.cores() if core.turns}
    for name in await sessions.repository.oldest_anonymous(sessions.tenant, _CANDIDATES + len(busy)):
        if name not in busy:
            with suppress(SessionNotFound):
                await sessions.delete(name)
                return True
    return False
