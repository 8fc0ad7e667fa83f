"""All sessions of one runtime: create, find, list, delete."""

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
from agentkv.engine.loading import LoadedModel
from agentkv.engine.templates import ChatTemplate
from agentkv.engine.toolcalls.choosing import check_format
from agentkv.errors import AgentKVError, Closed, ContextTooLong, InvalidRequest, SessionNotFound, Unsupported
from agentkv.logs import Log, fault
from agentkv.policies.retention import Adaptive, RetentionPolicy, check_fits, parse_policy, policy_text
from agentkv.schemas.messages import Message, MessageInput
from agentkv.schemas.replies import Event
from agentkv.sessions.branching import RewindReport
from agentkv.sessions.chains import root
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.records import BY_ID, Caller, ItemRecord, SessionRecord, TurnRecord
from agentkv.sessions.db.repository import Repository
from agentkv.sessions.explaining import Explanation, explained
from agentkv.sessions.hints import Hints
from agentkv.sessions.histories import History
from agentkv.sessions.moving import Moving
from agentkv.sessions.prewarming import prewarmed
from agentkv.sessions.relief import relieved
from agentkv.sessions.session import Session
from agentkv.sessions.tiers import Tiers
from agentkv.sessions.turn import Appended, Turn, TurnInput, events_of
from agentkv.sessions.verifying import Verification, verified
from agentkv.settings import Settings
from agentkv.types import Placement, RestoreReport, SessionState, Span, Tier

__all__ = ["Sessions"]

log = Log(__name__)

T = TypeVar("T")
_TENANT = "default"


class Sessions:
    """``kv.sessions``. One object a runtime; every method may be called from any task of its loop."""

    def __init__(self, settings: Settings, model: LoadedModel, repository: Repository) -> None:
        check_format(settings.tool_format)
        self.repository = repository
        self._settings = settings
        self._model = model
        self._cores: dict[str, SessionCore] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.choosing_holder = asyncio.Lock()
        self.tiers: Tiers
        self.hints: Hints

    @property
    def engine(self) -> Engine:
        """The model thread."""
        return self._model.engine

    @property
    def closed(self) -> bool:
        """Whether the runtime is closing, or has."""
        return self._closed

    def cores(self) -> list[SessionCore]:
        """Sessions that this process has touched."""
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
        find it. Raises ``InvalidRequest`` for what the template, the model or this runtime cannot honour.
        """
        self._check_open()
        retention = _chosen(self._settings.default_policy if policy is None else policy)
        self._check_movable(retention)
        codec = idle_codec or self._settings.idle_codec
        self.tiers.writer.codec(codec)
        if system is not None and not isinstance(system, str):
            raise InvalidRequest(f"system must be a string, not {type(system).__name__}", param="system")
        now = time.time()
        record = SessionRecord(
            id=f"sess_{secrets.token_hex(16)}",
            tenant=_TENANT,
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
        template, head = await asyncio.to_thread(self._head, core)
        limit = self._model.context_limit
        if len(head) >= limit:
            raise ContextTooLong(
                tokens=len(head) + 1, limit=limit, advice="system prompt and tools alone exceed it; shorten them"
            )
        check_fits(retention, Span(0, len(head)), limit)
        items, turn = _head_records(system, head, now)
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

    def _check_movable(self, policy: RetentionPolicy) -> None:
        fixed = self._model.adapter.geometry.fixed
        if policy.evicts and fixed is not None:
            raise Unsupported(
                f"policy {policy.name!r} with {self._model.name!r}",
                f"{fixed}, so that nothing can be evicted: use 'full'",
                param="policy",
            )

    @property
    def tenant(self) -> str:
        """Whose sessions these are."""
        return _TENANT

    def root(self, history: History) -> str:
        """The root of the chains of a session that is created for ``history``."""
        return root(
            tenant=self.tenant,
            kv_fingerprint=self._model.fingerprints.kv,
            session_fingerprint=self._model.fingerprints.session,
            policy=policy_text(_chosen(self._settings.default_policy)),
            idle_codec=self._settings.idle_codec,
            system=history.system,
            tools=history.tools,
            template_args=history.template_args,
        )

    async def set_policy(self, core: SessionCore, policy: str | RetentionPolicy) -> None:
        """See ``Session.set_policy``."""
        retention = _chosen(policy)
        self._check_movable(retention)
        text = policy_text(retention)
        async with core.turn(None):
            check_fits(retention, Span(0, core.record.pinned), self._model.context_limit)
            # An adaptive session is what it is asked to be, whatever it is under now.
            if text in (core.record.policy, core.record.policy.partition(":now=")[0]):
                return
            self._check_pinned(core.record, retention)
            if core.kv is not None and self.tiers.layout.reserves:
                # Reserved for the old policy's window: the next turn restores it into one of the right size.
                await self.tiers.demote(core, Tier.HOST)
            core.record = await self.repository.update_session(core.id, policy=text, policy_since=core.record.kv_length)

    async def update(self, core: SessionCore, fields: Mapping[str, Any]) -> None:
        """See ``Session.update``."""
        self._check_open()
        async with core.gate:
            core.check_open()
            if fields:
                core.record = await self.repository.update_session(core.id, **fields)

    @staticmethod
    def _check_pinned(record: SessionRecord, policy: RetentionPolicy) -> None:
        """No policy promises what an earlier one has evicted."""
        wanted = min(policy.pinned_tokens(Span(0, record.pinned)), record.pinned, record.kv_length)
        held = sum(len(span.intersect(Span(0, wanted))) for span in record.held.kept)
        if policy.evicts and held < wanted:
            raise InvalidRequest(
                f"policy {policy.name!r} keeps the first {wanted:,} tokens (system prompt and tools), of which "
                f"{record.policy!r} has evicted {wanted - held:,}: go on under it or 'full', or begin a new session",
                param="policy",
            )

    def _head(self, core: SessionCore) -> tuple[ChatTemplate | None, list[int]]:
        if self._model.tokenizer is None:
            if core.record.system is not None or core.record.tools or core.record.template_args:
                raise InvalidRequest(
                    "this model has no tokenizer: create the session without system, tools and template_args, "
                    "then use append_tokens and generate_tokens",
                    param="system",
                )
            return None, []
        template = core.chat(self._model.tokenizer)
        core.tool_use(self._model.tokenizer, self._settings.tool_format)
        return template, template.head().ids

    async def get(self, session_id: str) -> Session:
        """An existing conversation, wherever its KV is. ``SessionNotFound`` if there is none."""
        self._check_open()
        core = self._cores.get(session_id)
        if core is None:
            record = await self.repository.get_session(session_id, _TENANT)
            self._check_ledger(record)
            # Another task may have been faster: both must see one core.
            core = self._cores.setdefault(session_id, SessionCore(record, SessionState(record.state)))
        if core.deleted:
            raise SessionNotFound(session_id)
        return Session(core, self)

    async def import_(self, path: str | os.PathLike[str], *, keep_id: bool = False) -> Session:
        """The session that was exported to ``path``, as a new one; ``Session.imported`` says how much KV came along.

        With the KV fingerprint that it was exported under (same weights, same dtype) it goes on as it would have there;
        under another its ledger is computed again by the next turn. All of the file is read before anything is written,
        and nothing in it is executed or used as a path. ``keep_id``: under its own ids, where none of them is here.
        Raises ``ImportRefused`` for a file that was cut, altered or is no export, ``InvalidRequest`` where this runtime
        cannot go on with the session (another tokenizer, a policy or codec that is not here), ``StorageFull`` where its
        KV does not fit; nothing is left behind then, nor where it is cancelled.
        """
        self._check_open()
        core, report = await self.moving.import_(path, keep_id=keep_id)
        self.tiers.observer.created(core)
        return Session(core, self, imported=report)

    @cached_property
    def moving(self) -> Moving:
        """Export and import."""
        return Moving(self, self._model, self._settings.home)

    def adopt(self, core: SessionCore) -> None:
        """A session that is stored already is known from now on."""
        self._cores[core.id] = core

    def check_core(self, core: SessionCore) -> None:
        """Raise ``InvalidRequest`` where this runtime cannot go on with a session that was made elsewhere. Blocking."""
        record = core.record
        self._check_ledger(record)
        policy = parse_policy(record.policy)
        self._check_movable(policy)
        check_fits(policy, Span(0, record.pinned), self._model.context_limit)
        self.tiers.writer.codec(record.idle_codec)
        self._head(core)

    def _check_ledger(self, record: SessionRecord) -> None:
        ours = self._model.fingerprints.session
        if record.session_fingerprint.split(".")[0] != ours.split(".")[0]:
            raise InvalidRequest(
                f"session {record.id} was written with the tokenizer of {record.model!r}; {self._model.name!r} has "
                f"another one and would misread it. Open the runtime with model={record.model!r}",
                param="model",
            )

    async def list(
        self, *, agent_id: str | None = None, limit: int = 100, before: str | None = None
    ) -> list[SessionRecord]:
        """Records, newest first; ``before`` is the last id of the previous page."""
        self._check_open()
        return await self.repository.list_sessions(_TENANT, agent_id, limit, before)

    async def delete(self, session_id: str) -> int:
        """Delete a conversation and the files that no other needs. Returns the bytes freed on disk.

        Waits for a turn under way. ``SessionNotFound`` if there is none. Files that cannot be deleted now go later.
        """
        self._check_open()
        core = self._cores.get(session_id)
        if core is None:
            record = await self.repository.get_session(session_id, _TENANT)
            core = self._cores.setdefault(session_id, SessionCore(record, SessionState(record.state)))
        return await asyncio.shield(self.tracked(self._delete(core)))

    async def _delete(self, core: SessionCore) -> int:
        async with core.gate:
            if core.deleted:
                raise SessionNotFound(core.id)
            core.deleted = True
            if core.writing is not None:
                await asyncio.wait([core.writing])
            try:
                await self.repository.delete_session(core.id, _TENANT)
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
        if core.turns:
            # A turn is running on it: what was committed before is in SQL alone.
            record = await self.repository.get_session(core.id, _TENANT)
            source = SessionCore(record, SessionState.DISK)
            fork = await branching.fork(source, item, agent_id=agent_id, metadata=metadata, caller=caller)
            self._cores[fork.id] = fork
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
            await self.tiers.residency.reserve(core, core.record.ledger_length)
            try:
                return await verified(core, tokens, self._model, self.tiers)
            finally:
                self.tiers.residency.settle(core)

    async def resume(self, core: SessionCore) -> RestoreReport:
        """See ``Session.resume``."""
        async with core.gate:
            core.check_open()
            tokens = core.record.ledger_length

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

    def bytes_by_layers(self, placement: Placement) -> dict[str, int]:
        """Bytes of KV that a state with this placement holds, by layer group."""
        geometry = self._model.adapter.geometry
        sizes: dict[str, int] = {}
        for group in geometry.groups:
            sliding = min(placement.length - placement.floor, group.window or 0)
            tokens = placement.tokens if group.window is None else sliding
            sizes[group.name] = sizes.get(group.name, 0) + tokens * group.values_per_token * geometry.itemsize
        return sizes

    def tracked(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that ``close`` waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this runtime is closed")

    async def flush(self) -> None:
        """See ``AgentKV.flush``."""
        self._check_open()
        for core in self.cores():
            async with core.gate:
                if not core.deleted:
                    await self.tiers.behind.flush(core)

    async def close(self) -> None:
        """Cancel running turns, then store what is live. Idempotent."""
        self._closed = True
        if hasattr(self, "hints"):
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


def _chosen(policy: str | RetentionPolicy) -> RetentionPolicy:
    """A policy that somebody chooses: an adaptive one finds by itself what it is under."""
    chosen = parse_policy(policy)
    if isinstance(chosen, Adaptive) and chosen.window is not None:
        raise InvalidRequest(
            f"policy 'adaptive' begins as 'full' and moves by itself: give it without now={chosen.now!r}",
            param="policy",
        )
    return chosen


def _head_records(system: str | None, head: Sequence[int], now: float) -> tuple[list[ItemRecord], TurnRecord | None]:
    """The system span as an item, and the turn that put it into the ledger."""
    if not head:
        return [], None
    span = Span(0, len(head))
    content = Message(role="system", content=system or "").canonical()
    item = ItemRecord(f"item_{secrets.token_hex(12)}", 0, 0, "system", "message", content, span, False)
    return [item], TurnRecord(0, span, "head", None, len(head), 0, 0, None, None, now)
