"""Where each session's KV is, inside byte budgets: device, host memory, disk.

    new ─▶ live ─▶ demoting ─▶ host ─▶ disk
             ▲                  │       │
             └──── restoring ◀──┴───────┘

Every committed turn is written behind to disk, so that demoting mostly drops memory. A transition holds the session's
gate, works to the side and swaps at its end; where it fails, the session is what it was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from agentkv.errors import ChunkFault, QuotaReached, StorageError, StorageFull
from agentkv.kv.contract import Layout, SequenceKV
from agentkv.logs import Log, fault
from agentkv.memory import memory_told
from agentkv.policies.residency import ResidencyPolicy
from agentkv.sessions.attaching import Attaching
from agentkv.sessions.branching import Branching
from agentkv.sessions.choosing import Choice, Choosing, interchangeable
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.records import Manifest
from agentkv.sessions.db.repository import Repository
from agentkv.sessions.observing import Observer
from agentkv.sessions.residency import Residency
from agentkv.sessions.restoring import ChunkReader
from agentkv.sessions.storing import ChunkWriter
from agentkv.sessions.writebehind import WriteBehind
from agentkv.storage.blobs import BlobStore
from agentkv.storage.faultpoints import fault_point
from agentkv.storage.host import HostTier
from agentkv.types import RestoreReport, SessionState, SuspendReport, Tier

__all__ = ["Tiers"]

log = Log(__name__)

_Compute = Callable[[SequenceKV], Awaitable[None]]


class Tiers:
    """Moves sessions between tiers. All methods run on the event loop; blocking work goes to ``executor``."""

    def __init__(
        self,
        repository: Repository,
        blobs: BlobStore,
        host: HostTier,
        writer: ChunkWriter,
        reader: ChunkReader,
        attaching: Attaching,
        layout: Layout[Any],
        executor: Executor,
        cores: Callable[[], Iterable[SessionCore]],
        *,
        kv_fingerprint: str,
        context: int,
        device_budget: int,
        residency: ResidencyPolicy,
        measured: bool,
        most_waiting: int,
        wait_seconds: float,
        idle_seconds: float,
        disk_seconds: float,
    ) -> None:
        """``measured``: stored KV may be computed instead, where that was measured to be faster."""
        self.repository = repository
        self.blobs = blobs
        self.host = host
        self.writer = writer
        self._reader = reader
        self.attaching = attaching
        self.layout = layout
        self._executor = executor
        self._cores = cores
        self._fingerprint = kv_fingerprint
        self._context = context
        self.residency = Residency(
            self,
            layout,
            cores,
            residency,
            context=context,
            budget=device_budget,
            most_waiting=most_waiting,
            wait_seconds=wait_seconds,
        )
        self._choosing = Choosing(self.residency.rates)
        self._measured = measured
        self._idle_seconds = idle_seconds
        self._disk_seconds = disk_seconds
        self.observer = Observer()
        self.branching = Branching(self)
        self.behind = WriteBehind(repository, writer, executor, self.observer)

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """How often stored KV could not be used, by reason."""
        return self.observer.total.fallbacks

    @property
    def device_bytes(self) -> int:
        """Bytes reserved on the device by all sessions."""
        return self.residency.used

    @property
    def device_budget(self) -> int:
        """Most bytes that they may reserve."""
        return self.residency.budget

    @device_budget.setter
    def device_budget(self, nbytes: int) -> None:
        self.residency.budget = nbytes
        self.residency.admission.freed()

    # -- restoring ----------------------------------------------------------------------------------------------------

    async def make_live(self, core: SessionCore, room: int = 0, compute: _Compute | None = None) -> RestoreReport:
        """The session's KV on the device, from wherever it is. Call with the gate held and memory reserved.

        Never fails over stored KV: what cannot be used is left out, and the report says why; the caller computes the
        rest of the ledger. ``compute`` fills an empty state with all that the last commit held, or closes it and
        raises: where that is as good as what is stored and was measured to be faster, it is called instead.
        ``OutOfDeviceMemory`` where an allocation fails.
        """
        if core.kv is not None:
            missing = max(0, core.record.kv_length - core.kv.length)
            reason = core.short if missing else None
            return RestoreReport("device", core.kv.tokens, reason=reason, recomputed_tokens=missing)
        expected = core.record.kv_length
        if expected == 0:
            if core.record.kv_fingerprint != self._fingerprint:
                await self._claim(core)
            core.kv, core.state = self.open(core, room), SessionState.LIVE
            return RestoreReport("new", 0)
        started = time.perf_counter()
        before, core.state = core.state, SessionState.RESTORING
        try:
            with memory_told():
                report = await self._restore(core, expected, room, compute)
        except BaseException:
            core.state = before
            raise
        core.state = SessionState.LIVE
        self.release_host(core)
        core.unsaved, core.short = None, report.reason
        report = replace(report, seconds=time.perf_counter() - started)
        self._choosing.restored(report)
        self.observer.restored(core, report, self.residency.rates.estimate(report.source, report.tokens).recompute)
        return report

    async def _claim(self, core: SessionCore) -> None:
        """Its KV is this model's from now on. Of its record nothing else is read: a turn may be about to change it."""
        await self.repository.update_session(core.id, core.record.tenant, kv_fingerprint=self._fingerprint)
        core.record = replace(core.record, kv_fingerprint=self._fingerprint)

    def open(self, core: SessionCore, room: int = 0) -> SequenceKV:
        """A new, empty state for the session, with room for so many tokens; ``OutOfDeviceMemory`` without memory."""
        limit = core.limit(self._context)
        with memory_told():
            return self.layout.open(min(room, limit), limit)

    async def _restore(self, core: SessionCore, expected: int, room: int, compute: _Compute | None) -> RestoreReport:
        ledger = await core.load(self.repository)
        if core.writing is not None:
            await asyncio.wait([core.writing])  # KV that was lost, not demoted, may be being written
        if core.record.kv_fingerprint != self._fingerprint:
            # Another model's KV: its bytes make room for this one's.
            await self._forget(core, 0)
            await self._claim(core)
            core.kv = self.open(core, core.record.held.tokens + room)
            return RestoreReport("recompute", 0, 0.0, None, "fingerprint: stored by another model", expected)
        manifest = (await self.repository.manifest(core.id)).up_to(expected)
        core.stored, core.snapped, core.sealed = manifest.length, None, self.writer.sealed(manifest)
        if core.unsaved is not None:
            manifest = manifest.followed_by(core.unsaved)
        choice = self._choice(core, manifest, compute is not None)
        if compute is not None and choice.reason is not None:
            return choice.told(await self._recomputed(core, expected + room, compute, choice.reason))
        fault_point("restore.before_read")
        limit = core.limit(self._context)
        holds = core.record.held.tokens + room  # also where less than that comes back
        restored = await self._reader.restore(
            core.record.tenant, manifest, ledger, holds, limit=limit, points=core.evicts
        )
        kv = restored.kv
        tokens = kv.length
        reason = None
        if restored.fault is not None:
            self._note_discarded()
            reason = f"{restored.fault.reason}: chunk {restored.fault.chunk_id}: {restored.fault.detail}"
            try:
                # What is stored behind the state that came back would not fit what is computed anew.
                await self._forget(core, tokens)
            except BaseException:
                kv.close()
                raise
        elif tokens < expected:
            if tokens < manifest.length:
                # Stored behind the last resume point by a process that died: it will be computed and stored anew.
                await self._forget(core, tokens)
            reason = f"unstored: {expected - tokens} tokens had not reached the disk"
        core.kv = kv
        if tokens == 0:
            reason = reason or "missing: nothing was stored"
            return choice.told(RestoreReport("recompute", 0, reason=reason, recomputed_tokens=expected))
        codec, rest = "+".join(restored.codecs), max(0, expected - tokens)
        return choice.told(RestoreReport(restored.source, kv.tokens, 0.0, codec, reason, rest))

    def _choice(self, core: SessionCore, manifest: Manifest, may_compute: bool) -> Choice:
        """Restore what is stored, or compute it."""
        near = bool(manifest.segments) and all(segment.chunk_id in self.host for segment in manifest.segments)
        source, tokens = "host" if near else "disk", manifest.length
        codec = self.writer.codec(core.record.idle_codec)
        if self._measured and may_compute and tokens and interchangeable(core, codec, self.layout.geometry):
            return self._choosing.choose(source, tokens)
        return self._choosing.restore(source, tokens)

    async def _recomputed(self, core: SessionCore, room: int, compute: _Compute, reason: str) -> RestoreReport:
        """All that the last commit held, computed. What is stored stays: the next turn's KV is stored behind it."""
        kv = self.open(core, room)
        await compute(kv)
        core.kv = kv
        return RestoreReport("recompute", 0, reason=reason, recomputed_tokens=kv.length)

    async def forget(self, core: SessionCore) -> None:
        """Give up the session's KV, live and stored: it is going to be another. Call with the gate held."""
        await self._forget(core, 0)
        core.unsaved, core.early = None, {}
        if core.kv is not None:
            core.kv.close()
        core.kv, core.state = None, SessionState.DISK

    async def _forget(self, core: SessionCore, position: int) -> None:
        """The manifest ends at ``position`` from now on; files that nobody needs any more go, now or with the next."""
        dropped = await self.repository.truncate_manifest(core.id, position)
        core.stored = core.snapped = min(position, core.stored or 0)
        core.sealed = min(position, core.sealed)
        if dropped:
            await self.writer.try_collecting(core.id)

    # -- demoting -----------------------------------------------------------------------------------------------------

    async def suspend(self, core: SessionCore, tier: Tier) -> SuspendReport:
        """Take the session off the device, to host memory or to disk. Idempotent; waits for a turn under way.

        Where the disk refuses, the session stops at host memory (where its tenant's quota does: what is not stored is
        computed again by the next turn), and the report's ``tier`` and ``details`` say so;
        ``StorageFull`` where that has no room either: the session then stays live. A cancelled caller gets its
        ``CancelledError`` once the move has ended: a half-written store would be known to SQL and not to ``core``.
        """
        task = asyncio.create_task(self._suspend(core, tier))
        task.add_done_callback(lambda _: self.residency.admission.freed())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    async def _suspend(self, core: SessionCore, tier: Tier) -> SuspendReport:
        started = time.perf_counter()
        async with core.gate:
            core.check_open()
            chunks = core.written_chunks
            if core.kv is not None:
                await self.demote(core, tier)
            elif tier is Tier.DISK and core.state is SessionState.HOST and core.unsaved is None:
                self.release_host(core)
                core.state = SessionState.DISK
            nbytes = await self.stored_bytes(await self.repository.manifest(core.id))
            nbytes += sum(core.held.values()) if core.unsaved else 0
            reached = Tier.HOST if core.state is SessionState.HOST else Tier.DISK
            trouble = core.refused or self.behind.storage_error
            return SuspendReport(
                session_id=core.id,
                tier=reached,
                nbytes=nbytes,
                seconds=time.perf_counter() - started,
                chunks_written=core.written_chunks - chunks,
                tokens=core.record.held.tokens,
                details={} if trouble is None else {"storage": str(trouble)},
            )

    async def demote(self, core: SessionCore, tier: Tier) -> None:
        """Take the live session off the device, as ``suspend`` does. Call with the gate held."""
        core.state = SessionState.DEMOTING
        try:
            await self._demote(core, tier)
        finally:
            if core.kv is not None:
                core.state = SessionState.LIVE
                self.release_host(core)

    async def _demote(self, core: SessionCore, tier: Tier) -> None:
        fault_point("suspend.begin")
        await self.behind.flush(core)
        fault_point("suspend.flushed")
        assert core.kv is not None
        held = core.stored != core.kv.length and await self._hold_unsaved(core)
        if not held and tier is Tier.HOST:
            held = await self._hold(core)
        state = SessionState.HOST if held else SessionState.DISK
        self.observer.demoted(core, Tier.HOST if held else Tier.DISK, core.reserved)
        kv, core.kv, core.state, core.reserved = core.kv, None, state, 0
        kv.close()
        if state is SessionState.DISK:
            core.ledger = None
        self.residency.admission.freed()
        fault_point("suspend.end")

    async def _hold_unsaved(self, core: SessionCore) -> bool:
        """Chunks that the disk does not take, into host memory, where nothing evicts them. ``False``: it took them, or
        may not, by the tenant's quota: what one has used up is no reason to hold all tenants' memory."""
        if isinstance(core.refused, QuotaReached):
            return False
        core.stored = core.snapped = None
        snapshot = await self.behind.snapshot(core, seal=False)
        if snapshot is None:
            return False
        chunks = await self.writer.encoded(core.record, snapshot)
        self._make_room(core, sum(chunk.nbytes for chunk in chunks))
        for chunk in chunks:
            if not self.host.put(chunk.id, chunk.tobytes()):
                raise StorageFull(
                    f"session {core.id} stays on the device: the disk refused its KV ({core.refused}) "
                    f"and host memory has no room for {chunk.nbytes:,} bytes; free disk space or raise host_budget"
                )
            core.held[chunk.id] = chunk.nbytes
        core.unsaved = snapshot.manifest([chunk.id for chunk in chunks])
        return True

    def _make_room(self, core: SessionCore, nbytes: int) -> bool:
        """Free host memory by letting the least recently used sessions go to disk alone."""
        if nbytes > self.host.budget_bytes:
            return False
        while self.host.free_bytes < nbytes:
            candidates = (c for c in self._cores() if c.state is SessionState.HOST and c is not core)
            others = [c for c in candidates if c.unsaved is None and c.idle]
            if not others:
                return False
            oldest = min(others, key=lambda c: c.last_used)
            self.release_host(oldest)
            oldest.state = SessionState.DISK
        return True

    async def _hold(self, core: SessionCore) -> bool:
        """Encoded chunks into host memory; least recently used sessions make room. ``False`` where they do not fit."""
        manifest = await self.repository.manifest(core.id)
        loop = asyncio.get_running_loop()
        if not self._make_room(core, await self.stored_bytes(manifest)):
            return False
        for segment in manifest.segments:
            try:
                buffer = await loop.run_in_executor(self._executor, self.blobs.get, segment.chunk_id)
            except (ChunkFault, StorageError):
                self.release_host(core)
                return False
            if not self.host.put(segment.chunk_id, buffer):
                self.release_host(core)
                return False
            core.held[segment.chunk_id] = len(buffer)
        return True

    def release_host(self, core: SessionCore) -> None:
        """None of its chunks is in host memory any more, for this session's sake."""
        for name in core.held:
            self.host.release(name)
        core.held = {}

    def _note_discarded(self) -> None:
        """Chunks that turned out to be altered left host memory, whoever wanted them there: forks share theirs."""
        for core in self._cores():
            core.held = {name: nbytes for name, nbytes in core.held.items() if name in self.host}

    async def stored_bytes(self, manifest: Manifest) -> int:
        """Bytes on disk of a manifest's chunks."""

        def total() -> int:
            size = 0
            for segment in manifest.segments:
                try:
                    size += self.blobs.size(segment.chunk_id)
                except (ChunkFault, StorageError):
                    continue
            return size

        return await asyncio.get_running_loop().run_in_executor(self._executor, total)

    async def drop(self, core: SessionCore) -> None:
        """Forget a deleted session's memory. Call with the gate held."""
        if core.kv is not None:
            core.kv.close()
        core.kv, core.reserved, core.ledger = None, 0, None
        self.release_host(core)
        self.residency.admission.freed()

    # -- idle sessions ------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Demote what is idle, until cancelled."""
        pause = max(0.02, min(1.0, self._idle_seconds / 4 or 0.02, self._disk_seconds / 4 or 0.02))
        while True:
            await asyncio.sleep(pause)
            now = time.monotonic()
            for core in list(self._cores()):
                idle = now - core.last_used
                if core.deleted or not core.idle:
                    continue
                try:
                    if core.kv is not None and idle >= self._idle_seconds:
                        await self.suspend(core, Tier.DISK if idle >= self._disk_seconds else Tier.HOST)
                    elif core.state is SessionState.HOST and idle >= self._disk_seconds:
                        await self.suspend(core, Tier.DISK)
                except Exception as error:  # one session's trouble must not end the watch over the others
                    core.last_used = now  # try again after another idle period, not at once
                    log.error("not_demoted", session=core.id, **fault(error))
