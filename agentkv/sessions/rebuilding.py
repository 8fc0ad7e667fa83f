"""The index of stored KV, rebuilt from the files: each says itself whose KV it is.

The ledger is the truth. A file is taken up where it continues the stored KV of a session: same tenant, same model, same
token ids and everything before them, at the positions where that session holds them. What was deleted on purpose stays
deleted.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from blake3 import blake3

from agentkv.codecs import CODECS
from agentkv.errors import ChunkFault, StorageError
from agentkv.sessions.db.records import ChunkRecord, ManifestConflict, ResumePoint, SegmentRecord, SessionRecord
from agentkv.sessions.db.repository import Repository
from agentkv.storage.blobs import BlobStore
from agentkv.storage.chunkfile import HEAD_LIMIT, ChunkHeader, read_header
from agentkv.storage.naming import LedgerChain, ids_bytes, lookup_key, tenant_salt
from agentkv.types import Span

__all__ = ["RebuildReport", "adopt_orphans"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What became of files without an index row.

    ``files`` were found; ``adopted`` of them hold ``tokens`` of ``sessions`` sessions again; ``deleted`` had been
    deleted on purpose; ``aside``, which continue no session's KV, or cannot be read, were moved to quarantine.
    """

    files: int = 0
    adopted: int = 0
    sessions: int = 0
    tokens: int = 0
    deleted: int = 0
    aside: int = 0


@dataclass(slots=True)
class _Orphans:
    """Headers of files that the index does not know, and their sizes."""

    headers: list[ChunkHeader] = field(default_factory=list)
    nbytes: dict[str, int] = field(default_factory=dict)

    def covering(self, position: int) -> Iterator[ChunkHeader]:
        """Those that hold a ledger position, the farthest-reaching first."""
        found = (header for header in self.headers if header.start <= position < header.stop)
        return iter(sorted(found, key=lambda header: (-header.stop, self.nbytes[header.chunk_id])))


async def adopt_orphans(repository: Repository, blobs: BlobStore, secret: bytes, executor: Executor) -> RebuildReport:
    """Take up, delete or move aside every file without an index row. ``secret``: the home's, for tenants' salts."""
    loop = asyncio.get_running_loop()
    known = await repository.known_chunk_ids()
    names = [name for name, _ in await loop.run_in_executor(executor, lambda: list(blobs.list())) if name not in known]
    if not names:
        return RebuildReport()
    buried = await repository.tombstoned(names)
    orphans = await loop.run_in_executor(executor, _read, blobs, [name for name in names if name not in buried])
    adopted: set[str] = set()
    sessions = tokens = 0
    if orphans.headers:
        async for record in _sessions(repository):
            taken = await _adopt(repository, record, orphans, secret)
            adopted |= {segment.chunk_id for segment in taken}
            sessions, tokens = sessions + bool(taken), tokens + sum(len(segment.span) for segment in taken)

    def clear() -> int:
        for name in buried:
            blobs.delete(name)
        left = [name for name in names if name not in buried and name not in adopted]
        return sum(blobs.quarantine(name, "orphan") for name in left)

    aside = await loop.run_in_executor(executor, clear)
    return RebuildReport(len(names), len(adopted), sessions, tokens, len(buried), aside)


def _read(blobs: BlobStore, names: Sequence[str]) -> _Orphans:
    found = _Orphans()
    for name in names:
        try:
            nbytes = blobs.size(name)
            found.headers.append(read_header(blobs.get(name, limit=HEAD_LIMIT), name, nbytes=nbytes))
            found.nbytes[name] = nbytes
        except (ChunkFault, StorageError) as error:
            logger.warning("a file without an index row cannot be taken up: %s", error)
    return found


async def _sessions(repository: Repository) -> AsyncIterator[SessionRecord]:
    before: str | None = None
    while page := await repository.list_sessions("default", None, 200, before):
        for record in page:
            yield record
        before = page[-1].id


async def _adopt(
    repository: Repository, record: SessionRecord, orphans: _Orphans, secret: bytes
) -> list[SegmentRecord]:
    """What continues the session's stored KV becomes part of its manifest."""
    manifest = await repository.manifest(record.id)
    if manifest.length >= record.kv_length:
        return []
    ledger = await repository.ledger(record.id)
    headers = _continuing(record, ledger, manifest.length, orphans, tenant_salt(secret, record.tenant))
    if not headers:
        return []
    segments = [SegmentRecord(header.chunk_id, span) for header, span in headers]
    try:
        await repository.append_segments(
            record.id,
            [_chunk_record(header, record, orphans.nbytes[header.chunk_id]) for header, _ in headers],
            segments,
            _points(record, headers),
        )
    except ManifestConflict as error:
        logger.warning("stored KV of session %s could not be taken up: %s", record.id, error)
        return []
    return segments


def _continuing(
    record: SessionRecord, ledger: array[int], stored: int, orphans: _Orphans, salt: bytes
) -> list[tuple[ChunkHeader, Span]]:
    """Chunks, and what of them, that follow the stored KV without a hole; for a session that evicts: all or nothing."""
    digest = blake3(salt).hexdigest()[:40]
    held = record.held
    found: list[tuple[ChunkHeader, Span]] = []
    for kept in held.kept:
        at = max(kept.start, stored)
        while at < kept.stop:
            fits = (
                header
                for header in orphans.covering(at)
                if header.tenant == digest
                and header.kv_fingerprint == record.kv_fingerprint
                and header.position_base == held.position_of(header.start)
                and _is_of(header, ledger, min(header.stop, kept.stop))
                and _may_serve(header, record, salt)
            )
            if (header := next(fits, None)) is None:
                return found if record.placement is None else []
            found.append((header, Span(at, min(header.stop, kept.stop))))
            at = found[-1][1].stop
    return found


def _is_of(header: ChunkHeader, ledger: array[int], stop: int) -> bool:
    """Whether the chunk's ids, up to ``stop``, and all before them are the ledger's."""
    ids = ids_bytes(ledger[header.start : stop])
    return header.token_ids[: len(ids)] == ids and (
        header.chain_start == LedgerChain().extend(ledger[: header.start]).digest()
    )


def _may_serve(header: ChunkHeader, record: SessionRecord, salt: bytes) -> bool:
    """A session that is kept exactly takes only chunks that no lossy codec or layout took part in."""
    if record.idle_codec not in set(CODECS) or not CODECS.get(record.idle_codec).exact:
        return True
    return header.lookup_key == lookup_key(
        salt,
        header.kv_fingerprint,
        start=header.start,
        stop=header.stop,
        chain=header.chain,
        lineage=header.lineage,
    )


def _points(record: SessionRecord, headers: Sequence[tuple[ChunkHeader, Span]]) -> list[ResumePoint]:
    reached = headers[-1][1].stop
    if record.placement is not None:
        return [ResumePoint(record.kv_length, "commit", record.placement)]
    points = {p for header, span in headers for p in header.resume_points if span.start < p <= span.stop}
    if reached == record.kv_length:
        points.add(reached)
    return [ResumePoint(p, "prefix" if p == record.pinned else "commit") for p in sorted(points)]


def _chunk_record(header: ChunkHeader, record: SessionRecord, nbytes: int) -> ChunkRecord:
    return ChunkRecord(
        header.chunk_id, header.lookup_key, record.tenant, header.kv_fingerprint, header.span, header.codec, nbytes
    )
