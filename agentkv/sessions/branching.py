"""Conversations as trees: a session that begins as another one, or goes back to an earlier item of its own.

    a ── b ── c ── d          a session
         └─ c'── d'           forked at b: the same chunks up to there, and on the device the same bytes

No KV is copied. Where the state at that place cannot be had from what is live (a sliding window has moved on, recurrent
layers have gone on, a policy has evicted), the branch starts from the last resume point stored before it, and its next
turn computes the rest.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from agentkv.errors import InvalidRequest
from agentkv.kv.contract import SequenceKV
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.records import Caller, Cut, ItemRecord
from agentkv.types import Placement, SessionState

if TYPE_CHECKING:
    from agentkv.sessions.tiers import Tiers

__all__ = ["Branching", "Place", "RewindReport"]


@dataclass(frozen=True, slots=True)
class RewindReport:
    """What going back does. ``items`` and ``tokens`` of the ledger are given up, ``ledger_tokens`` stay.

    ``recompute_tokens``: those of them that have no KV any more, which the next turn computes; it takes about
    ``recompute_seconds`` (``None`` until this runtime has measured a prefill).
    """

    session_id: str
    items: int
    tokens: int
    ledger_tokens: int
    recompute_tokens: int
    recompute_seconds: float | None


@dataclass(slots=True)
class Place:
    """Where a conversation is cut, and the state there, where it could be had from what is live: to be closed."""

    cut: Cut
    kv: SequenceKV | None

    def close(self) -> None:
        """Give up the state."""
        if self.kv is not None:
            self.kv.close()


class Branching:
    """Runs on the event loop. Every method that takes a session is called with its gate held."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._repository = tiers.repository
        self._forgets = any(group.window is not None for group in tiers.layout.geometry.groups)

    # -- where to -----------------------------------------------------------------------------------------------------

    async def _items_up_to(self, core: SessionCore, item: str | int) -> tuple[list[ItemRecord], int]:
        """All items, and how many there are up to ``item``, itself included, or before the last so many turns.

        ``InvalidRequest`` for an item, or turns, that the session does not have.
        """
        items = await self._repository.items(core.id)
        if isinstance(item, int):
            said = core.record.turns - bool(core.record.pinned)
            if not 0 <= item <= said:
                raise InvalidRequest(f"session {core.id} has {said} turns: it cannot go back {item}", param="turns")
            return items, sum(record.turn < core.record.turns - item for record in items)
        for count, record in enumerate(items, 1):
            if record.id == item:
                return items, count
        raise InvalidRequest(
            f"session {core.id} has no item {item!r}: session.items() lists its {len(items)}", param="item"
        )

    async def place(self, core: SessionCore, items: Sequence[ItemRecord], keep: int) -> Place:
        """Behind the first ``keep`` items."""
        record = core.record
        if keep == len(items):
            kv = None if core.kv is None or core.kv.length != record.kv_length else core.kv.fork()
            length = record.ledger_length
            return Place(Cut(length, length, keep, record.turns, record.kv_length, record.placement), kv)
        position = items[keep - 1].span.stop if keep else 0
        turns = items[keep - 1].turn + 1 if keep else 0
        kv = None if core.kv is None else core.kv.fork()
        if kv is not None:
            try:
                kv.crop(min(self._end(core, position), kv.length))
            except ValueError:
                kv.close()
                kv = None
        held = await self._stored(core, position) if kv is None else kv.placement
        placement = None if held.trivial else held
        return Place(Cut(record.ledger_length, position, keep, turns, held.length, placement), kv)

    async def _stored(self, core: SessionCore, position: int) -> Placement:
        """The last state up to ``position`` that is stored, or that was committed and may be."""
        end = self._end(core, position)
        if end >= core.record.kv_length:
            return core.record.held
        if not core.evicts and not self._forgets:
            return Placement.whole(end)
        await self._tiers.behind.flush(core)
        manifest = await self._repository.manifest(core.id)
        points = [point for point in manifest.resume_points if point.position <= end]
        return max(points).held if points else Placement()

    @staticmethod
    def _end(core: SessionCore, position: int) -> int:
        """Tokens with KV of a ledger that ends there: as after a turn, the last token's is left to the next step."""
        return position if position == core.record.pinned else max(0, position - 1)

    # -- forking ------------------------------------------------------------------------------------------------------

    async def fork(
        self,
        core: SessionCore,
        item: str | int,
        *,
        agent_id: str | None,
        metadata: Mapping[str, Any] | None,
        caller: Caller,
    ) -> SessionCore:
        """A new session that begins with this one's items up to ``item``, or without its last so many turns.

        It is on the device where this one is and memory is free: in the same bytes until one of them writes. Who calls
        registers it before anything else is awaited: its memory counts from then on. ``LedgerConflict`` where
        ``core`` is what was read of a session before its last commit.
        """
        items, keep = await self._items_up_to(core, item)
        place, room = await self.place(core, items, keep), self._tiers.residency
        try:
            if place.kv is None or not room.is_free(place.kv.nbytes):
                await self.written(core)  # it will have what is on disk
            fork = await self._stored_fork(core, place.cut, agent_id, metadata, caller)
        except BaseException:
            place.close()
            raise
        if place.kv is None:
            return fork
        if not room.take_bytes(fork, place.kv.nbytes):
            place.close()
            return fork
        fork.kv, fork.state = place.kv, SessionState.LIVE
        fork.early = {at: parts for at, parts in core.early.items() if at <= place.cut.kv_length}
        room.settle(fork)
        return fork

    async def _stored_fork(
        self, core: SessionCore, cut: Cut, agent_id: str | None, metadata: Mapping[str, Any] | None, caller: Caller
    ) -> SessionCore:
        now, record = time.time(), core.record
        state = SessionState.DISK if cut.kv_length else SessionState.NEW
        forked = replace(
            record,
            id=f"sess_{secrets.token_hex(16)}",
            agent_id=record.agent_id if agent_id is None else agent_id,
            metadata=dict(record.metadata if metadata is None else metadata),
            ledger_length=cut.position,
            kv_length=cut.kv_length,
            placement=cut.placement,
            policy_since=min(record.policy_since, cut.kv_length),
            turns=cut.turns,
            created_at=now,
            updated_at=now,
            state=state.value,  # type: ignore[arg-type]
            parent_id=record.id,
            forked_at=cut.position,
            clock=record.created_at if record.clock is None else record.clock,
            **asdict(caller),
        )
        await self._repository.fork_session(record.id, forked, cut, record.tenant)
        fork = SessionCore(forked, state)
        fork.template = core.template
        return fork

    # -- rewinding ----------------------------------------------------------------------------------------------------

    async def rewind(self, core: SessionCore, item: str | int, *, dry_run: bool) -> RewindReport:
        """End the session behind ``item``, or before its last so many turns. ``dry_run``: only say what that does."""
        items, keep = await self._items_up_to(core, item)
        await self.written(core)
        place = await self.place(core, items, keep)
        try:
            report = self._report(core, len(items), place.cut)
            if dry_run or not report.tokens:
                place.close()
                return report
            dropped = await self._repository.rewind_session(core.id, place.cut, core.record.tenant)
        except BaseException:
            place.close()
            raise
        self.become(core, place.cut, place.kv)
        if dropped:
            await self._tiers.writer.try_collecting(core.id)
        return report

    def _report(self, core: SessionCore, items: int, cut: Cut) -> RewindReport:
        missing = cut.position - cut.kv_length
        return RewindReport(
            core.id,
            items - cut.items,
            core.record.ledger_length - cut.position,
            cut.position,
            missing,
            self._tiers.residency.rates.estimate("disk", missing).recompute,
        )

    @asynccontextmanager
    async def without_answer(self, core: SessionCore) -> AsyncIterator[Cut]:
        """Inside, the session has not given its last answer: the next turn is to be committed in its place.

        Nothing changes in SQL. Where the turn fails the answer is there as before; of its KV, which is given up, it is
        computed again by the next turn.
        """
        items = await self._repository.items(core.id)
        if not items or not items[-1].generated:
            raise InvalidRequest(f"the last item of session {core.id} is no answer: there is nothing to make again")
        await self.written(core)
        place = await self.place(core, items, len(items) - 1)
        cut = place.cut
        turns = [turn for turn in await self._repository.turns(core.id) if turn.span.stop <= cut.position]
        whole = len(turns) == cut.turns  # else it is a part of its turn that stays
        put_back = core.shorten(cut, items[:-1], turns[-1].finish_reason if turns and whole else None)
        if core.kv is not None:
            core.kv.close()
            core.kv, core.state = place.kv, SessionState.DISK if place.kv is None else SessionState.LIVE
        try:
            yield cut
        except BaseException:
            if core.record.turns > cut.turns:
                raise  # cancelled once it was committed: the new answer stands
            put_back()
            core.short = "unstored: the answer was being made again"
            raise

    async def written(self, core: SessionCore) -> None:
        """Nothing of the session is being written any more."""
        if core.writing is not None:
            await asyncio.wait([core.writing])

    def become(self, core: SessionCore, cut: Cut, kv: SequenceKV | None) -> None:
        """This process's view of a session that ends at ``cut`` in SQL, with the state ``kv``, where there is one."""
        core.forget_ledger()
        core.record = replace(
            core.record,
            ledger_length=cut.position,
            kv_length=cut.kv_length,
            placement=cut.placement,
            policy_since=min(core.record.policy_since, cut.kv_length),
            turns=cut.turns,
            updated_at=time.time(),
        )
        self.shorten_stored(core, cut)
        if core.kv is not None:
            core.kv.close()
        core.kv = kv
        self._tiers.release_host(core)
        if kv is not None:
            core.state = SessionState.LIVE
        else:
            core.state = SessionState.DISK if cut.kv_length else SessionState.NEW
        self._tiers.residency.settle(core)

    @staticmethod
    def shorten_stored(core: SessionCore, cut: Cut) -> None:
        """What is known to be stored of it ends at ``cut`` too."""
        if core.stored is not None:
            core.stored = min(core.stored, cut.kv_length)
        core.snapped = None
        core.sealed = min(core.sealed, cut.kv_length)
        core.early = {at: parts for at, parts in core.early.items() if at <= cut.kv_length}
        core.unsaved = core.short = None
