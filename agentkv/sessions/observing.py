"""Where events are told and counts are kept: one object that every part of a runtime reports to."""

from __future__ import annotations

from collections.abc import Callable

from agentkv.sessions.core import SessionCore
from agentkv.sessions.events import Events
from agentkv.sessions.stats import Counts
from agentkv.types import RestoreReport, Tier, Usage

__all__ = ["Observer"]


class Observer:
    """Runs on the event loop; nothing here waits. ``total``: of all sessions, deleted ones included."""

    def __init__(self) -> None:
        self.events = Events()
        self.total = Counts()
        self.byte_seconds: dict[str, float] = {}
        """Device memory of sessions that are gone, by agent."""
        self.on_turn: Callable[[SessionCore, Usage], None] | None = None
        """Told of each committed turn."""
        self._storage_error: str | None = None

    def created(self, core: SessionCore) -> None:
        """A new session, with its head in the ledger."""
        self.events.emit("created", core.id, agent=core.record.agent_id or "", tokens=core.record.ledger_length)

    def deleted(self, core: SessionCore, freed: int) -> None:
        """A session is gone for good; ``freed``: bytes on disk."""
        agent = core.record.agent_id or ""
        self.byte_seconds[agent] = self.byte_seconds.get(agent, 0.0) + core.memory.now()
        self.events.emit("deleted", core.id, freed_bytes=freed)

    def turn(self, core: SessionCore, usage: Usage, known: int, evicted: int) -> None:
        """A turn was committed; ``known``: tokens that the last commit held; ``evicted``: given up in it."""
        for counts in (core.counts, self.total):
            counts.turn(usage, known)
        if self.on_turn is not None:
            self.on_turn(core, usage)
        if evicted:
            self.events.emit("evicted", core.id, tokens=evicted)

    def adapted(self, core: SessionCore, before: str, after: str) -> None:
        """A turn was committed with which an adaptive session came under another policy."""
        self.events.emit("adapted", core.id, policy=after, before=before, tokens=core.record.ledger_length)

    def restored(self, core: SessionCore, report: RestoreReport, recompute: float | None) -> None:
        """Its KV is on the device again, all of it or a part; ``recompute``: expected seconds for what was reused.

        A restore that was passed over is told of as ``recomputed``, and is no fallback.
        """
        for counts in (core.counts, self.total):
            counts.restore(report, recompute)
        seconds = round(report.seconds, 4)
        expected = {
            "estimated_restore_seconds": report.estimated_restore_seconds,
            "estimated_recompute_seconds": report.estimated_recompute_seconds,
        }
        estimates = {name: round(value, 4) for name, value in expected.items() if value is not None}
        if report.tokens:
            self.events.emit(
                "restored",
                core.id,
                source=report.source,
                tokens=report.tokens,
                seconds=seconds,
                codec=report.codec or "",
                **estimates,
            )
        if report.chosen:
            self.events.emit("recomputed", core.id, tokens=report.recomputed_tokens, seconds=seconds, **estimates)
        elif report.reason is not None:
            kind, tokens = report.reason.split(":")[0], report.recomputed_tokens
            self.events.emit("fallback", core.id, reason=kind, detail=report.reason, tokens=tokens, **estimates)

    def demoted(self, core: SessionCore, tier: Tier, nbytes: int) -> None:
        """It left the device, which has so many bytes more."""
        self.events.emit("demoted", core.id, tier=str(tier), device_bytes=nbytes)

    def refused(self, core: SessionCore, needed: int) -> None:
        """There was no memory for its turn."""
        self.events.emit("refused", core.id, needed_bytes=needed)

    def quota(self, core: SessionCore, error: str | None) -> None:
        """Its KV is not written any more, as its tenant has used up what it may have on disk; ``None``: it is again."""
        self.events.emit("storage_ok" if error is None else "storage_full", core.id, reason=error or "")

    def storage(self, error: str | None) -> None:
        """What the disk said to the last write; ``None`` where it took it. Told when it changes."""
        if (error is None) != (self._storage_error is None):
            self.events.emit("storage_ok" if error is None else "storage_full", None, reason=error or "")
        self._storage_error = error
