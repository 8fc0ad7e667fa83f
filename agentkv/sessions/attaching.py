"""A new session begins with KV that others have stored for the same head: system prompt and tools.

The head is computed once and stored once, however many sessions begin with it, together or one after the other. A
session shares a chunk only by attaching to it before it computes anything itself: the same tokens may have other bits.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import replace

from agentkv.errors import ChunkFault, StorageError
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.records import ChunkRecord, ManifestConflict, ResumePoint, SegmentRecord
from agentkv.sessions.db.repository import Repository
from agentkv.sessions.storing import ChunkWriter, chains
from agentkv.storage.blobs import BlobStore
from agentkv.storage.chunkfile import HEAD_LIMIT, MAX_CHUNK_TOKENS, read_header
from agentkv.types import SessionState, Span

__all__ = ["Attaching", "Lead"]

_PATIENCE = 60.0
"""Seconds after which a session computes a head that another one has not stored yet."""
_LEAST = 64
"""A shorter head is computed sooner than it is looked up and read."""


class Lead:
    """The computing of a head that other sessions wait for, until it is stored or given up."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._handed_on = False

    def stored_by(self, writing: asyncio.Task[None]) -> None:
        """It is being written: the others go on when that has ended, well or not."""
        self._handed_on = True
        writing.add_done_callback(lambda _: self._release())

    def end(self) -> None:
        """The turn has ended. Where nothing is being written, the others wait in vain no longer."""
        if not self._handed_on:
            self._release()


class Attaching:
    """Finds a new session's head among the stored chunks of its tenant."""

    def __init__(
        self, repository: Repository, blobs: BlobStore, writer: ChunkWriter, executor: Executor, *, forgets: bool
    ) -> None:
        """``forgets``: whether some of the model's layers see a sliding window only."""
        self._repository = repository
        self._blobs = blobs
        self._writer = writer
        self._executor = executor
        self._forgets = forgets
        self._leading: dict[str, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def attached(self, core: SessionCore, ledger: array[int]) -> AsyncIterator[Lead | None]:
        """Make stored chunks the session's own, as far as they reach. Call with the gate held, before its first KV.

        What is found is restored by the caller like any stored KV: where it turns out to be bad, it is computed. Where
        another session computes the same head just now, its being stored is waited for, a bounded time. Yields
        ``None``; or, where this session is the one to compute the head for the others, what it tells them through.
        """
        if core.kv is not None or core.record.kv_length or core.record.pinned < _LEAST:
            yield None
            return
        if core.record.kv_fingerprint != self._writer.kv_fingerprint:
            yield None  # made under another model, whose name its stored KV would bear
            return
        keys = self._keys(core, ledger)
        head = keys[-1]
        deadline = time.monotonic() + _PATIENCE
        while not await self._attach(core, keys):
            if (leader := self._leading.get(head)) is None:
                break
            await asyncio.wait([leader], timeout=max(0.0, deadline - time.monotonic()))
            if not leader.done():
                yield None
                return
        else:
            yield None
            return
        mine = self._leading[head] = asyncio.get_running_loop().create_future()

        def release() -> None:
            if self._leading.get(head) is mine:
                del self._leading[head]
            if not mine.done():
                mine.set_result(None)

        lead = Lead(release)
        try:
            yield lead
        finally:
            lead.end()

    async def _attach(self, core: SessionCore, keys: Sequence[str]) -> bool:
        """Whether stored chunks are the session's own now."""
        pinned = core.record.pinned
        found = await self._found(core, keys)
        reached = found[-1].span.stop if found else 0
        if not found or (reached < pinned and (self._forgets or core.evicts)):
            return False
        if self._forgets and not await self._resumes(found[-1].id, pinned):
            return False
        segments = [SegmentRecord(chunk.id, chunk.span) for chunk in found]
        points = [ResumePoint(pinned, "prefix")] if reached == pinned else []
        try:
            kv_length = await self._repository.attach(core.id, segments, points)
        except ManifestConflict:
            return False  # they are being deleted, or it has stored KV in spite of all: computing is always right
        core.record = replace(core.record, kv_length=kv_length, state="disk")
        core.state, core.stored, core.snapped = SessionState.DISK, None, None
        return True

    def _keys(self, core: SessionCore, ledger: array[int]) -> list[str]:
        """Lookup keys of the head's chunks, as this session cuts it."""
        spans = list(Span(0, core.record.pinned).split(MAX_CHUNK_TOKENS))
        codec = self._writer.codec(core.record.idle_codec)
        ends = [end for _, end in chains(ledger, spans)]
        return [self._writer.key(core.record.tenant, span, end, codec) for span, end in zip(spans, ends, strict=True)]

    async def _found(self, core: SessionCore, keys: Sequence[str]) -> list[ChunkRecord]:
        """Stored chunks that tile the head from its start on, as this session would have cut it."""
        stored = {chunk.lookup_key: chunk for chunk in await self._repository.stored_chunks(core.record.tenant, keys)}
        found = []
        for key in keys:
            if (chunk := stored.get(key)) is None:
                break
            found.append(chunk)
        return found

    async def _resumes(self, chunk_id: str, position: int) -> bool:
        """Whether sliding windows are stored with which to go on from there."""

        def look() -> bool:
            header = read_header(
                self._blobs.get(chunk_id, limit=HEAD_LIMIT), chunk_id, nbytes=self._blobs.size(chunk_id)
            )
            return position in header.resume_points

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, look)
        except (ChunkFault, StorageError):
            return False
