"""Write-behind: what a turn added goes to disk in the background, one snapshot of a session at a time."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from functools import partial

from agentkv.errors import AgentKVError, QuotaReached, StorageError
from agentkv.logs import Log, fault
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.repository import Repository
from agentkv.sessions.observing import Observer
from agentkv.sessions.snapshots import Snapshot, take_snapshot
from agentkv.sessions.storing import ChunkWriter

__all__ = ["WriteBehind"]

log = Log(__name__)

_MOST_PENDING = 4
"""Snapshots of one session that may wait for the disk; then its turns wait too."""


class WriteBehind:
    """Stores sessions' KV. Trouble is noted, never raised: the session stays usable, the next turn tries again.

    ``storage_error``: what the disk said last, ``None`` while it takes what it is given.
    """

    def __init__(self, repository: Repository, writer: ChunkWriter, executor: Executor, observer: Observer) -> None:
        self._repository = repository
        self._writer = writer
        self._executor = executor
        self._observer = observer
        self.storage_error: str | None = None

    async def add(self, core: SessionCore) -> None:
        """Take what the last turn added, and store it in the background. Call with the gate held, after a commit."""
        if core.pending >= _MOST_PENDING and core.writing is not None:
            await asyncio.wait([core.writing])
        snapshot = await self.snapshot(core)
        if snapshot is not None:
            core.pending += 1
            core.snapped = snapshot.span.stop
            if snapshot.sealed:
                core.sealed = snapshot.sealed[-1].stop
            core.writing = asyncio.create_task(self._write_after(core, core.writing, snapshot))

    async def _write_after(self, core: SessionCore, previous: asyncio.Task[None] | None, snapshot: Snapshot) -> None:
        if previous is not None and not previous.done():
            await asyncio.wait([previous])
        try:
            if core.stored == snapshot.span.start and not core.deleted:
                await self._write(core, snapshot)
        finally:
            core.pending -= 1

    async def snapshot(self, core: SessionCore, *, seal: bool = True) -> Snapshot | None:
        """What lies behind the newest snapshot, or behind the manifest where the last write failed.

        ``seal``: whether a lossy codec may take the place of what is stored losslessly.
        """
        if core.kv is None:
            return None
        if core.stored is None:
            manifest = await self._repository.manifest(core.id)
            core.stored, core.snapped, core.sealed = manifest.length, None, self._writer.sealed(manifest)
        start = core.stored if core.snapped is None else core.snapped
        work = partial(
            take_snapshot,
            core.kv,
            start,
            core.sealed,
            core.record.pinned,
            dict(core.early),
            seal=seal and not self._writer.codec(core.record.idle_codec).exact,
        )
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def _write(self, core: SessionCore, snapshot: Snapshot) -> None:
        """Store one snapshot; trouble is noted, never raised: the session stays usable, the next turn tries again."""
        try:
            report = await self._writer.store(core.record, snapshot)
        except AgentKVError as error:
            if isinstance(error, StorageError):
                self._answered(core, error)
            core.stored = core.snapped = None
            if not core.deleted:
                level = logging.INFO if isinstance(error, QuotaReached) else logging.ERROR
                log.at(level, "kv_not_written", session=core.id, **fault(error))
        else:
            self._answered(core, None)
            core.stored = report.stop
            core.written_chunks += report.chunks
            codec = self._writer.codec(core.record.idle_codec)
            done = report.stop if codec.exact else min(report.stop, core.sealed)
            core.early = {p: parts for p, parts in core.early.items() if p > done}

    def _answered(self, core: SessionCore, error: StorageError | None) -> None:
        """What the disk said to a session's write. A tenant that has used up its own is no trouble of the disk's."""
        if not isinstance(error, QuotaReached):
            self.storage_error = None if error is None else str(error)
            self._observer.storage(self.storage_error)
        before, core.refused = core.refused, error
        if isinstance(before, QuotaReached) != isinstance(error, QuotaReached):
            self._observer.quota(core, None if error is None else str(error))

    async def flush(self, core: SessionCore) -> int:
        """Everything that the session has on the device is on disk, or the trouble is noted. New chunks' count.

        Call with the gate held.
        """
        if core.kv is None:
            return 0
        before = core.written_chunks
        if core.writing is not None:
            await asyncio.wait([core.writing])
        if core.stored != core.kv.length:
            core.stored = core.snapped = None
            snapshot = await self.snapshot(core)
            if snapshot is not None:
                await self._write(core, snapshot)
        return core.written_chunks - before
