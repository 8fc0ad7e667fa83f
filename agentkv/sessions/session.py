"""The public face of one conversation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from operator import index
from typing import TYPE_CHECKING, Any

from agentkv.errors import InvalidRequest
from agentkv.policies.retention import RetentionPolicy
from agentkv.schemas.messages import MessageInput, normalise
from agentkv.schemas.replies import Begun, Done, Event, Item, Reply, SessionInfo
from agentkv.schemas.sampling import SamplingParams
from agentkv.sessions.branches import Branch, edited, sampled
from agentkv.sessions.branching import RewindReport
from agentkv.sessions.core import SessionCore
from agentkv.sessions.entering import TurnInput, public_item
from agentkv.sessions.explaining import Explanation
from agentkv.sessions.hints import HintOutcome
from agentkv.sessions.reporting import session_usage
from agentkv.sessions.spans import bytes_by_layers, gaps, held_spans, item_states
from agentkv.sessions.stats import SessionUsage
from agentkv.sessions.turn import Appended
from agentkv.sessions.verifying import Verification
from agentkv.types import ExportReport, ImportReport, RestoreReport, SessionState, Span, SuspendReport, Tier

if TYPE_CHECKING:
    from agentkv.sessions.db.records import SessionRecord
    from agentkv.sessions.manager import Sessions

__all__ = ["Session"]


class Session:
    """One agent conversation with a persistent KV state. Get one from ``kv.sessions``; handles are cheap.

    Turns take sampling parameters by their usual names: ``temperature``, ``top_p``, ``top_k``, ``min_p``,
    ``repetition_penalty``, ``seed``, ``stop``, ``max_tokens``, ``logprobs``, ``ignore_eos``. Without a temperature
    decoding is greedy. ``max_tokens`` is cut to what the model's context leaves; ``finish_reason`` is then ``length``.
    ``schema`` (a pydantic class or a JSON Schema), ``response_format`` or ``constraint`` make the reply follow it:
    ``Reply.parsed`` is what it says. ``tool_choice`` (``"auto"``, ``"none"``, ``"required"``, ``{"name": …}``): whether
    the reply may, must not or must be ``Reply.tool_calls``.

    One turn at a time: a second raises ``SessionBusy``, or waits with ``wait=True`` for at most
    ``Settings.busy_wait_seconds``. Cancelling a turn's task, or leaving its stream early, rolls the turn back.
    """

    def __init__(self, core: SessionCore, sessions: Sessions, *, imported: ImportReport | None = None) -> None:
        self._core = core
        self._sessions = sessions
        self.imported = imported
        """How the import went that this handle is from; ``None`` for all others."""

    def __repr__(self) -> str:
        r = self._core.record
        return f"<Session {r.id} {self._core.state} {r.ledger_length} tokens>"

    @property
    def id(self) -> str:
        """``sess_…``: keep it to come back."""
        return self._core.id

    @property
    def agent_id(self) -> str | None:
        """The name given at creation."""
        return self._core.record.agent_id

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What was given at creation."""
        return dict(self._core.record.metadata)

    @property
    def record(self) -> SessionRecord:
        """Its row in SQL, as of the last commit."""
        return self._core.record

    # -- turns --------------------------------------------------------------------------------------------------------

    async def send(self, messages: MessageInput, *, wait: bool = False, **sampling: Any) -> Reply:
        """Add messages (a string, one message, or a list) and generate the reply. Returns once it is committed."""
        return await _last(self.stream(messages, wait=wait, **sampling))

    async def stream(
        self, messages: MessageInput, *, wait: bool = False, begun: bool = False, **sampling: Any
    ) -> AsyncGenerator[Event]:
        """As ``send``, as events: ``TextDelta`` and ``ToolCallEvent`` while it generates, ``Done`` once committed; with
        ``begun`` a ``Begun`` before them, as soon as it is known what is reused and what has to be computed.

        Leaving the loop early rolls the turn back soon; with ``contextlib.aclosing`` around the stream, at once.
        """
        request = TurnInput("send", tuple(self._checked(messages)), sampling=SamplingParams.build(**sampling))
        async with aclosing(self._events(request, wait, begun)) as events:
            async for event in events:
                yield event

    async def continue_(self, *, wait: bool = False, **sampling: Any) -> Reply:
        """Generate without new input: go on where ``max_tokens`` cut the last reply, or answer appended messages."""
        return await _last(self.stream_continue(wait=wait, **sampling))

    async def stream_continue(
        self, *, wait: bool = False, begun: bool = False, **sampling: Any
    ) -> AsyncGenerator[Event]:
        """``continue_`` as events."""
        request = TurnInput("continue", sampling=SamplingParams.build(**sampling))
        async with aclosing(self._events(request, wait, begun)) as events:
            async for event in events:
                yield event

    async def append(self, messages: MessageInput, *, wait: bool = False) -> list[Item]:
        """Commit messages as given, assistant messages included, and generate nothing. Their KV is computed now."""
        request = TurnInput("append", tuple(self._checked(messages)))
        return await _appended(self._run(request, wait))

    async def append_tokens(self, ids: Sequence[int], *, wait: bool = False) -> list[Item]:
        """``append`` for raw token ids: no template, no text."""
        if not ids:
            raise InvalidRequest("pass at least one token id", param="ids")
        return await _appended(self._run(TurnInput("append", ids=_ints(ids)), wait))

    async def generate_tokens(self, ids: Sequence[int] = (), *, wait: bool = False, **sampling: Any) -> Reply:
        """Add raw token ids, perhaps none, and generate; the reply has ``ids`` and no text."""
        request = TurnInput("send", ids=_ints(ids), sampling=SamplingParams.build(**sampling))
        return await _last(self._run(request, wait))

    # -- branches -----------------------------------------------------------------------------------------------------

    async def fork(
        self,
        at_item: str | None = None,
        *,
        turns: int = 0,
        agent_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Session:
        """A new session that begins with this one's items up to and with ``at_item``, or without its last ``turns``.

        No KV is copied: both use the same chunks, and on the device the same bytes until one of them writes. During a
        turn it begins with what was committed before. ``agent_id`` and ``metadata`` are this one's unless given.
        ``InvalidRequest`` for an item or turns that this session does not have.
        """
        if at_item is not None and turns:
            raise InvalidRequest("fork at an item, or a number of turns before the end: not both", param="turns")
        forking = self._sessions.fork(
            self._core, turns if at_item is None else at_item, agent_id=agent_id, metadata=metadata
        )
        return await asyncio.shield(self._sessions.tracked(forking))

    async def rewind(
        self, to_item: str | None = None, *, turns: int | None = None, dry_run: bool = False
    ) -> RewindReport:
        """Go back to the end of ``to_item``, or by so many ``turns``: what came later is gone for good.

        Keep it by a ``fork`` first. The report says what the next turn has to compute, and how long that takes: nothing
        where the KV at that place is there, more where a sliding window or a policy has gone on. ``dry_run``: report
        only. ``SessionBusy`` during a turn.
        """
        if (to_item is None) == (turns is None):
            raise InvalidRequest("rewind to an item, or by a number of turns: name one of the two", param="to_item")
        rewinding = self._sessions.rewind(self._core, turns if to_item is None else to_item, dry_run)  # type: ignore[arg-type]
        return await asyncio.shield(self._sessions.tracked(rewinding))

    async def regenerate(self, *, wait: bool = False, **sampling: Any) -> Reply:
        """Make the last answer again, in its place. Until the new one is committed the old one is there."""
        request = TurnInput("continue", sampling=SamplingParams.build(**sampling), again=True)
        return await _last(self._run(request, wait))

    async def sample(self, messages: MessageInput | None = None, *, n: int, **sampling: Any) -> list[Branch]:
        """``n`` answers to the same messages (``None``: to what was appended), each in a fork of its own.

        The messages are computed once and the answers decode side by side; this session stays as it is. With a ``seed``
        branch i uses ``seed + i``. Delete the branches that are not wanted. Where one fails none is left.
        """
        return await sampled(self, messages, n, sampling)

    async def edit(
        self, item: str, content: str | Mapping[str, Any], *, replay: bool = False, **sampling: Any
    ) -> Branch:
        """A fork in which ``item`` was another: a new text, or a whole message. The rest of its turn follows and is
        answered; ``replay``: the inputs of later turns too, each answered anew. This session stays as it is.

        In place of a generated answer the text stands as given.
        """
        return await edited(self, item, content, replay, sampling)

    def _checked(self, messages: MessageInput) -> list[Any]:
        checked = normalise(messages)
        if any(m.role in ("system", "developer") for m in checked) and self._core.record.turns == 0:
            raise InvalidRequest(
                "the system prompt belongs to the session: pass system=… to kv.sessions.create", param="messages"
            )
        return checked

    async def _events(self, request: TurnInput, wait: bool, begun: bool) -> AsyncGenerator[Event]:
        async with aclosing(self._run(request, wait)) as events:
            async for event in events:
                if begun or not isinstance(event, Begun):
                    yield event  # type: ignore[misc]

    def _run(self, request: TurnInput, wait: bool) -> AsyncGenerator[Event | Appended]:
        return self._sessions.run(self._core, request, wait)

    # -- reading ------------------------------------------------------------------------------------------------------

    async def items(self) -> list[Item]:
        """All items in order, the system prompt first."""
        self._core.check_open()
        return [public_item(record) for record in await self._sessions.repository.items(self.id)]

    async def token_ids(self) -> list[int]:
        """The ledger: every token id of the conversation."""
        self._core.check_open()
        return list(await self._sessions.repository.ledger(self.id))

    async def state(self) -> SessionInfo:
        """Where the session is and what it weighs."""
        core, sessions = self._core, self._sessions
        core.check_open()
        manifest = await sessions.repository.manifest(self.id)
        items = await sessions.repository.items(self.id)
        disk_bytes = await sessions.tiers.stored_bytes(manifest)
        r = core.record
        live = core.kv.placement if core.kv is not None and core.idle else r.held
        # What a restore could not bring back is computed by the next turn, and what it evicts was evicted before.
        placement = live if live.length == r.kv_length else r.held
        kept = held_spans(placement, r.ledger_length)
        tiers = {SessionState.LIVE: Tier.DEVICE, SessionState.HOST: Tier.HOST, SessionState.DISK: Tier.DISK}
        return SessionInfo(
            id=r.id,
            agent_id=r.agent_id,
            state=core.state,
            tier=tiers.get(core.state),
            busy=core.turns > 0,
            model=r.model,
            policy=r.policy,
            idle_codec=r.idle_codec,
            turns=r.turns,
            ledger_tokens=r.ledger_length,
            kv_tokens=live.tokens,
            stored_tokens=sum(len(segment.span) for segment in manifest.segments),
            pinned=Span(0, r.pinned),
            kept=kept,
            evicted=gaps(kept, r.ledger_length),
            items=tuple(item_states(items, kept)),
            next_position=placement.next_position,
            bytes_by_layers=bytes_by_layers(sessions.tiers.layout.geometry, live),
            device_bytes=core.kv.nbytes if core.kv is not None else 0,
            host_bytes=sum(core.held.values()),
            disk_bytes=disk_bytes,
            created_at=r.created_at,
            updated_at=r.updated_at,
            metadata=dict(r.metadata),
        )

    def usage(self) -> SessionUsage:
        """Tokens, restores and memory that it has used since the runtime opened."""
        self._core.check_open()
        return session_usage(self._core)

    async def explain(self, messages: MessageInput, *, tools: Sequence[Mapping[str, Any]] | None = None) -> Explanation:
        """Where a whole history, as a client without sessions sends it, would leave what is stored here, and what it
        would cost to answer it from there. Compared are roles, texts, tool calls and whose results are answered;
        ``tools`` where they are given. Changes nothing; waits for a turn under way."""
        return await self._sessions.explain(self._core, messages, tools)

    async def verify(self, *, tokens: int = 512) -> Verification:
        """Check every byte that is stored of it, compute its first ``tokens`` again and compare them, and what the
        model says after them, with what the session has. Brings it to the device; waits for a turn under way."""
        if tokens < 1:
            raise InvalidRequest(f"tokens must be at least 1, got {tokens}", param="tokens")
        return await asyncio.shield(self._sessions.tracked(self._sessions.verify(self._core, tokens)))

    # -- moving -------------------------------------------------------------------------------------------------------

    async def set_policy(self, policy: str | RetentionPolicy) -> None:
        """Change what stays in the KV state, from the next turn on. What was evicted before stays evicted: a policy
        that would have kept it is refused where that is the system prompt.

        ``SessionBusy`` during a turn; ``InvalidRequest`` for a policy that the pinned prefix or the model does not fit.
        """
        await asyncio.shield(self._sessions.tracked(self._sessions.set_policy(self._core, policy)))

    async def update(self, *, agent_id: str | None = None, metadata: Mapping[str, Any] | None = None) -> None:
        """Another agent's name or other metadata; ``None`` leaves what was."""
        given = {"agent_id": agent_id, "metadata": None if metadata is None else dict(metadata)}
        fields = {name: value for name, value in given.items() if value is not None}
        await asyncio.shield(self._sessions.tracked(self._sessions.update(self._core, fields)))

    async def suspend(self, tier: str = "disk") -> SuspendReport:
        """Take the KV off the device, to ``"host"`` memory or ``"disk"``. Waits for a turn under way. Idempotent."""
        if tier not in (Tier.HOST, Tier.DISK):
            raise InvalidRequest(f"tier {tier!r} is not one a session can be suspended to: host or disk", param="tier")
        return await asyncio.shield(self._sessions.tracked(self._sessions.tiers.suspend(self._core, Tier(tier))))

    async def resume(self) -> RestoreReport:
        """Bring the KV back to the device now, so that the next turn need not. Idempotent.

        Tokens whose stored KV is unusable are computed by the next turn; ``reason`` says so.
        """
        return await asyncio.shield(self._sessions.tracked(self._sessions.resume(self._core)))

    async def export(
        self, path: str | os.PathLike[str], *, replace: bool = False, allow_plain: bool = False
    ) -> ExportReport:
        """Write the conversation with its stored KV into one file, which ``kv.sessions.import_`` reads elsewhere.

        As it is after the turn under way, which is waited for; a turn that begins meanwhile is not in it. The file is
        its owner's alone, and is all there or not at all. ``replace``: whether a file at ``path`` may give way.
        ``allow_plain``: where the home encrypts stored KV, write it all the same: the file is not encrypted. Raises
        ``InvalidRequest``, ``StorageFull`` and ``StorageError``.
        """
        self._core.check_open()
        return await self._sessions.moving.export(self._core, path, replace=replace, allow_plain=allow_plain)

    # -- hints --------------------------------------------------------------------------------------------------------

    async def expect(self, seconds: float) -> HintOutcome:
        """It is wanted again in so many seconds. Others may have its memory meanwhile; it comes back just before."""
        self._core.check_open()
        return await self._sessions.hints.expect(self._core, seconds)

    def tool_wait(self, expected: float) -> AbstractAsyncContextManager[HintOutcome]:
        """``async with session.tool_wait(expected=30): …`` around a tool that takes about so many seconds."""
        self._core.check_open()
        return self._sessions.hints.tool_wait(self._core, expected)

    async def prefetch(self) -> HintOutcome:
        """Bring the KV to the device now, if memory is free."""
        self._core.check_open()
        return await self._sessions.hints.prefetch(self._core)

    async def pin(self, seconds: float) -> HintOutcome:
        """Keep the KV on the device for so many seconds, within ``Settings.pin_budget``; 0 ends it."""
        self._core.check_open()
        return await self._sessions.hints.pin(self._core, seconds)

    async def close(self) -> HintOutcome:
        """The conversation rests: its KV goes to disk now. A later turn brings it back."""
        self._core.check_open()
        return await self._sessions.hints.close(self._core)

    async def delete(self) -> int:
        """Delete the conversation and its files. Returns the bytes freed on disk."""
        return await self._sessions.delete(self.id)


def _ints(ids: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(index(i) for i in ids)
    except TypeError:
        raise InvalidRequest("token ids must be integers", param="ids") from None


async def _last(events: AsyncIterator[Event | Appended]) -> Reply:
    event = await _last_event(events)
    assert isinstance(event, Done), event
    return event.reply


async def _appended(events: AsyncIterator[Event | Appended]) -> list[Item]:
    event = await _last_event(events)
    assert isinstance(event, Appended), event
    return list(event.items)


async def _last_event(events: AsyncIterator[Event | Appended]) -> Event | Appended | None:
    last = None
    async for event in events:
        last = event
    return last
