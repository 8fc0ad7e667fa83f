"""The sessions of one tenant, beside all others of a runtime: create, find, list, delete."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, TypeVar

from agentkv.engine.engine import Engine
from agentkv.engine.toolcalls.choosing import check_format
from agentkv.errors import AgentKVError, Closed, InvalidRequest, SessionNotFound
from agentkv.logs import Log, fault
from agentkv.policies.retention import RetentionPolicy, check_fits, policy_text
from agentkv.schemas.messages import MessageInput
from agentkv.schemas.replies import Event
from agentkv.sessions import accepting
from agentkv.sessions.branching import RewindReport
from agentkv.sessions.chains import root
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.records import BY_ID, Caller, LedgerConflict, SessionRecord
from agentkv.sessions.db.repository import Repository
from agentkv.sessions.entering import TurnInput
from agentkv.sessions.explaining import Explanation, explained
from agentkv.sessions.hints import Hints
from agentkv.sessions.histories import History
from agentkv.sessions.moving import Moving
from agentkv.sessions.prewarming import prewarmed
from agentkv.sessions.relief import relieved
from agentkv.sessions.session import Session
from agentkv.sessions.shared import Shared
from agentkv.sessions.tiers import Tiers
from agentkv.sessions.turn import Appended, Turn, events_of
from agentkv.sessions.verifying import Verification, verified
from agentkv.types import RestoreReport, SessionState, Span, Tier

__all__ = ["Sessions"]

log = Log(__name__)

_FORK_ATTEMPTS = 3
"""A session that commits while it is forked is looked at again, so often; then the fork waits its turn."""

T = TypeVar("T")


class Sessions:
    """``kv.sessions``, ``kv.tenant(name)``: one tenant's. Every method may be called from any task of the loop.

    Engine, budgets and memory are those of all tenants. Another tenant's session is ``SessionNotFound``.
    """

    def __init__(self, shared: Shared, tenant: str) -> None:
        check_format(shared.settings.tool_format)
        self.tenant = tenant
        self.repository: Repository = shared.repository
        self.shared = shared
        self._settings = shared.settings
        self._model = shared.model
        self._cores = shared.cores
        self._tasks = shared.tasks

    @property
    def tiers(self) -> Tiers:
        """Where all sessions' KV is."""
        return self.shared.tiers

    @property
    def hints(self) -> Hints:
        """What is expected of sessions."""
        return self.shared.hints

    @property
    def engine(self) -> Engine:
        """The model thread."""
        return self._model.engine

    @property
    def closed(self) -> bool:
        """Whether the runtime is closing, or has."""
        return self.shared.closed

    def cores(self) -> list[SessionCore]:
        """Sessions, of every tenant, that this process has touched."""
        return list(self._cores.values())

    async def create(
        self,
        system: str | None = None,
        *,
        agent_id: str | None = None,
        policy: str | RetentionPolicy | None = None,
        idle_codec: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        caller: Caller = BY_ID,
    ) -> Session:
        """A new conversation. System prompt, tools and template arguments are frozen with it.

        ``policy``: what stays in the KV state, ``SinkWindow(4096)`` or its text ``"sink:4096"``; ``"adaptive"`` keeps
        everything as long as that fits; by default ``Settings.default_policy``. ``caller``: how clients that hold no id
        find it. Raises ``InvalidRequest`` for what the template, the model or this runtime cannot honour,
        ``LimitExceeded`` where the tenant's key allows no more.
        """
        self._check_open()
        retention = accepting.chosen_policy(self._settings.default_policy if policy is None else policy)
        accepting.check_movable(retention, self._model)
        codec = idle_codec or self._settings.idle_codec
        self.tiers.writer.codec(codec)
        if system is not None and not isinstance(system, str):
            raise InvalidRequest(f"system must be a string, not {type(system).__name__}", param="system")
        now = time.time()
        record = SessionRecord(
            id=f"sess_{secrets.token_hex(16)}",
            tenant=self.tenant,
            agent_id=agent_id,
            model=self._model.name,
            kv_fingerprint=self._model.fingerprints.kv,
            session_fingerprint=self._model.fingerprints.session,
            policy=policy_text(retention),
            idle_codec=codec,
            system=system,
            tools=[dict(tool) for tool in tools] if tools else None,
            template_args=dict(template_args or {}),
            metadata=dict(metadata or {}),
            pinned=0,
            ledger_length=0,
            kv_length=0,
            turns=0,
            created_at=now,
            updated_at=now,
            **asdict(caller),
        )
        core = SessionCore(record, SessionState.NEW)
        template, head = await asyncio.to_thread(accepting.head_of, core, self._model, self._settings.tool_format)
        accepting.check_head(retention, head, self._model)
        items, turn = accepting.head_records(system, head, now)
        core.record = replace(record, pinned=len(head), ledger_length=len(head), turns=1 if turn else 0)
        await self.repository.create_session(core.record, items, head, turn)
        core.template = template
        self._cores[core.id] = core
        self.tiers.observer.created(core)
        return Session(core, self)

    async def prewarm(
        self,
        system: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        idle_codec: str | None = None,
    ) -> Session:
        """Compute and store a head now, for all sessions that will be created with it: their first turns begin with it.

        Returns the session that holds it, of agent ``agentkv-prewarm``: while it is there the head stays stored, even
        when nobody else uses it. The same head again gives the same session. A head of fewer than 64 tokens is not
        worth it and is computed by each session. Raises as ``create`` does, and ``CapacityExceeded``.
        """
        return await prewarmed(self, self._model, system, tools, template_args, idle_codec)

    def root(self, history: History) -> str:
        """The root of the chains of a session that is created for ``history``."""
        return root(**self.beginning(history))

    def beginning(self, history: History) -> dict[str, Any]:
        """What the root of such a session is made of: the arguments of ``chains.root``."""
        return {
            "tenant": self.tenant,
            "kv_fingerprint": self._model.fingerprints.kv,
            "session_fingerprint": self._model.fingerprints.session,
            "policy": policy_text(accepting.chosen_policy(self._settings.default_policy)),
            "idle_codec": self._settings.idle_codec,
            "system": history.system,
            "tools": history.tools,
            "template_args": history.template_args,
        }

    async def set_policy(self, core: SessionCore, policy: str | RetentionPolicy) -> None:
        """See ``Session.set_policy``."""
        retention = accepting.chosen_policy(policy)
        accepting.check_movable(retention, self._model)
        text = policy_text(retention)
        async with core.turn(None):
            check_fits(retention, Span(0, core.record.pinned), self._model.context_limit)
            # An adaptive session is what it is asked to be, whatever it is under now.
            if text in (core.record.policy, core.record.policy.partition(":now=")[0]):
                return
            accepting.check_pinned(core.record, retention)
            if core.kv is not None and self.tiers.layout.reserves:
                # Reserved for the old policy's window: the next turn restores it into one of the right size.
                await self.tiers.demote(core, Tier.HOST)
            core.record = await self.repository.update_session(
                core.id, self.tenant, policy=text, policy_since=core.record.kv_length
            )

    async def update(self, core: SessionCore, fields: Mapping[str, Any]) -> None:
        """See ``Session.update``."""
        self._check_open()
        async with core.gate:
            core.check_open()
            if fields:
                core.record = await self.repository.update_session(core.id, self.tenant, **fields)

    async def get(self, session_id: str) -> Session:
        """An existing conversation, wherever its KV is. ``SessionNotFound`` if there is none."""
        self._check_open()
        core = await self._core(session_id)
        accepting.check_ledger(core.record, self._model)
        if core.deleted:
            raise SessionNotFound(session_id)
        return Session(core, self)

    async def _core(self, session_id: str) -> SessionCore:
        """The tenant's own, as this process knows it from now on."""
        core = self._cores.get(session_id)
        if core is None:
            record = await self.repository.get_session(session_id, self.tenant)
            # Another task may have been faster: both must see one core.
            core = self._cores.setdefault(session_id, SessionCore(record, SessionState(record.state)))
        if core.record.tenant != self.tenant:
            raise SessionNotFound(session_id)
        return core

    async def import_(self, path: str | os.PathLike[str], *, keep_id: bool = False) -> Session:
        """The session that was exported to ``path``, as a new one; ``Session.imported`` says how much KV came along.

        With the KV fingerprint that it was exported under (same weights, same dtype) it goes on as it would have there;
        under another its ledger is computed again by the next turn. All of the file is read before anything is written,
        and nothing in it is executed or used as a path. ``keep_id``: under its own ids, where none of them is here.
        Raises ``ImportRefused`` for a file that was cut, altered or is no export, ``InvalidRequest`` where this runtime
        cannot go on with the session (another tokenizer, a policy or codec that is not here), ``StorageFull`` where its
        KV does not fit, ``LimitExceeded`` as ``create`` does; nothing is left behind then, nor where it is cancelled.
        """
        self._check_open()
        core, report = await self.moving.import_(path, keep_id=keep_id)
        self.tiers.observer.created(core)
        return Session(core, self, imported=report)

    @cached_property
    def moving(self) -> Moving:
        """Export and import."""
        return Moving(self, self._model, self._settings.home, self.shared.importing)

    def adopt(self, core: SessionCore) -> None:
        """A session that is stored already is known from now on."""
        self._cores[core.id] = core

    def check_core(self, core: SessionCore) -> None:
        """Raise ``InvalidRequest`` where this runtime cannot go on with a session that was made elsewhere. Blocking."""
        accepting.check_core(core, self._model, self._settings.tool_format)
        self.tiers.writer.codec(core.record.idle_codec)

    async def list(
        self, *, agent_id: str | None = None, limit: int = 100, before: str | None = None
    ) -> list[SessionRecord]:
        """Records, newest first; ``before`` is the last id of the previous page."""
        self._check_open()
        return await self.repository.list_sessions(self.tenant, agent_id, limit, before)

    async def delete(self, session_id: str) -> int:
        """Delete a conversation and the files that no other needs. Returns the bytes freed on disk.

        Waits for a turn under way. ``SessionNotFound`` if there is none. Files that cannot be deleted now go later.
        """
        self._check_open()
        core = await self._core(session_id)
        return await asyncio.shield(self.tracked(self._delete(core)))

    async def _delete(self, core: SessionCore) -> int:
        async with core.gate:
            if core.deleted:
                raise SessionNotFound(core.id)
            core.deleted = True
            if core.writing is not None:
                await asyncio.wait([core.writing])
            try:
                await self.repository.delete_session(core.id, self.tenant)
            except SessionNotFound:
                raise
            except BaseException:
                core.deleted = False
                raise
            await self.tiers.drop(core)
            self._cores.pop(core.id, None)
        # The conversation is gone already: files that the disk will not let go yet are no reason to say otherwise.
        freed = await self.tiers.writer.try_collecting(core.id)
        self.tiers.observer.deleted(core, freed)
        return freed

    async def fork(
        self,
        core: SessionCore,
        item: str | int,
        *,
        agent_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        caller: Caller = BY_ID,
    ) -> Session:
        """See ``Session.fork``. ``caller``: how clients that hold no id find the new one."""
        self._check_open()
        core.check_open()
        branching = self.tiers.branching
        for _ in range(_FORK_ATTEMPTS if core.turns else 0):
            # A turn is running on it: what was committed before is in SQL alone.
            record = await self.repository.get_session(core.id, self.tenant)
            source = SessionCore(record, SessionState.DISK)
            source.writing = core.writing
            try:
                fork = await branching.fork(source, item, agent_id=agent_id, metadata=metadata, caller=caller)
            except LedgerConflict:
                continue  # it was committed meanwhile
            self._cores[fork.id] = fork
            break
        else:
            async with core.gate:
                core.check_open()
                fork = await branching.fork(core, item, agent_id=agent_id, metadata=metadata, caller=caller)
                self._cores[fork.id] = fork
        self.tiers.observer.created(fork)
        return Session(fork, self)

    async def rewind(self, core: SessionCore, item: str | int, dry_run: bool) -> RewindReport:
        """See ``Session.rewind``."""
        self._check_open()
        async with core.turn(None):
            return await self.tiers.branching.rewind(core, item, dry_run=dry_run)

    async def explain(
        self, core: SessionCore, messages: MessageInput, tools: Sequence[Mapping[str, Any]] | None
    ) -> Explanation:
        """See ``Session.explain``."""
        self._check_open()
        async with core.gate:
            core.check_open()
            return await explained(core, messages, tools, self._model, self.tiers)

    async def verify(self, core: SessionCore, tokens: int) -> Verification:
        """See ``Session.verify``."""
        self._check_open()
        async with core.gate:
            core.check_open()
            await self.tiers.behind.flush(core)
            await self.tiers.residency.reserve(core, core.record.held.tokens)
            try:
                return await verified(core, tokens, self._model, self.tiers)
            finally:
                self.tiers.residency.settle(core)

    async def resume(self, core: SessionCore) -> RestoreReport:
        """See ``Session.resume``."""
        async with core.gate:
            core.check_open()
            tokens = core.record.held.tokens

            async def attempt() -> RestoreReport:
                await self.tiers.residency.reserve(core, tokens)
                return await self.tiers.make_live(core)

            try:
                return await relieved(core, self.tiers, self.engine, tokens, attempt)
            finally:
                self.tiers.residency.settle(core)

    async def run(self, core: SessionCore, request: TurnInput, wait: bool) -> AsyncGenerator[Event | Appended]:
        """Run a turn; see ``Turn``."""
        self._check_open()
        core.check_open()
        settings = self._settings
        turn = Turn(
            core,
            self._model,
            self.tiers,
            request,
            default_max_tokens=settings.max_tokens,
            tool_format=settings.tool_format,
        )
        events = events_of(turn, self._tasks, self._settings.busy_wait_seconds if wait else None)
        async with aclosing(events):
            async for event in events:
                yield event

    def tracked(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that ``close`` waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _check_open(self) -> None:
        if self.closed:
            raise Closed("this runtime is closed")

    async def flush(self) -> None:
        """See ``AgentKV.flush``: of all tenants."""
        self._check_open()
        for core in self.cores():
            async with core.gate:
                if not core.deleted:
                    await self.tiers.behind.flush(core)

    async def close(self) -> None:
        """Cancel running turns, then store what is live, of all tenants. Idempotent."""
        self.shared.closed = True
        if hasattr(self.shared, "hints"):
            await self.hints.stop()
        running = [task for task in self._tasks if not task.done()]
        for task in running:
            if task.get_name() == "agentkv-turn":
                task.cancel()
        if running:
            await asyncio.wait(running)
        for core in self.cores():
            async with core.gate:
                try:
                    if not core.deleted:
                        await self.tiers.behind.flush(core)
                except AgentKVError as error:
                    # Its KV will be recomputed; the other sessions' is still to be stored.
                    log.error("kv_not_written", session=core.id, **fault(error))
                finally:
                    if core.kv is not None:
                        core.kv.close()
                        core.kv = None
