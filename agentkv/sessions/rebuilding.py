"""The index of stored KV, rebuilt from the files: each says itself whose KV it is.

The ledger is the truth. A file is taken up where it continues the stored KV of a session, or fills a hole of it: same
tenant, same model, same token ids and everything before them, at the positions where that session holds them. What was
deleted on purpose stays deleted.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from agentkv.codecs import CODECS
from agentkv.errors import ChunkFault, StorageError
from agentkv.logs import Log, fault
from agentkv.sessions.db.records import (
    ChunkRecord,
    Manifest,
    ManifestConflict,
    ResumePoint,
    SegmentRecord,
    SessionRecord,
)
from agentkv.sessions.db.repository import Repository
from agentkv.storage.blobs import BlobStore
from agentkv.storage.chunkfile import HEAD_LIMIT, ChunkHeader, read_header
from agentkv.storage.naming import LedgerChain, TenantSalts, ids_bytes, imported_quality, lookup_key
from agentkv.types import Span, union, without

__all__ = ["RebuildReport", "adopt_orphans"]

log = Log(__name__)


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What became of files that the index did not know, or not as what they are.

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
class _Spare:
    """Headers of files that the index does not know, or may not know all users of; their sizes."""

    headers: list[ChunkHeader] = field(default_factory=list)
    nbytes: dict[str, int] = field(default_factory=dict)

    def covering(self, position: int) -> Iterator[ChunkHeader]:
        """Those that hold a ledger position, the farthest-reaching first."""
        found = (header for header in self.headers if header.start <= position < header.stop)
        return iter(sorted(found, key=lambda header: (-header.stop, self.nbytes[header.chunk_id])))


async def adopt_orphans(repository: Repository, blobs: BlobStore, secret: bytes, executor: Executor) -> RebuildReport:
    """Take up, delete or move aside every file without an index row; put right what else of the index was lost.

    ``secret``: the home's, for tenants' salts.
    """
    loop = asyncio.get_running_loop()
    salts = TenantSalts(secret)
    known = await repository.known_chunk_ids()
    names = [name for name, _ in await loop.run_in_executor(executor, lambda: list(blobs.list())) if name not in known]
    buried = await repository.tombstoned(names)
    loose = await repository.loose_chunks()
    pointless = await repository.pointless_sessions()
    unburied = [name for name in names if name not in buried]
    spare = await loop.run_in_executor(executor, _read, blobs, [*unburied, *loose])
    adopted: set[str] = set()
    sessions = tokens = 0
    if spare.headers or pointless:
        async for record in _sessions(repository):
            if spare.headers or record.id in pointless:
                taken = await _adopt(repository, record, spare, salts)
                adopted |= {segment.chunk_id for segment in taken}
                sessions, tokens = sessions + bool(taken), tokens + sum(len(segment.span) for segment in taken)
    await repository.recount()

    def clear() -> int:
        for name in buried:
            blobs.delete(name)
        return sum(blobs.quarantine(name, "orphan") for name in unburied if name not in adopted)

    aside = await loop.run_in_executor(executor, clear)
    files = len(adopted.union(names))
    return RebuildReport(files, len(adopted), sessions, tokens, len(buried), aside)


def _read(blobs: BlobStore, names: Sequence[str]) -> _Spare:
    found = _Spare()
    for name in names:
        try:
            nbytes = blobs.size(name)
            found.headers.append(read_header(blobs.get(name, limit=HEAD_LIMIT), name, nbytes=nbytes))
            found.nbytes[name] = nbytes
        except (ChunkFault, StorageError) as error:
            log.warning("file_not_taken_up", chunk=name, **fault(error))
    return found


async def _sessions(repository: Repository) -> AsyncIterator[SessionRecord]:
    before: str | None = None
    while page := await repository.list_sessions(None, None, 200, before):
        for record in page:
            yield record
        before = page[-1].id


async def _adopt(
    repository: Repository, record: SessionRecord, spare: _Spare, salts: TenantSalts
) -> list[SegmentRecord]:
    """What its stored KV lacks becomes part of its manifest, and its last commit a resume point."""
    manifest = await repository.manifest(record.id)
    if _hole(record, manifest) is None and any(p.position == record.kv_length for p in manifest.resume_points):
        return []
    ledger = await repository.ledger(record.id)
    found, reached = _found(record, ledger, manifest, spare, salts)
    points = _points(record, found, reached)
    if not found and not points:
        return []
    segments = [SegmentRecord(header.chunk_id, span) for header, span in found]
    chunks = {header.chunk_id: _chunk_record(header, record, spare.nbytes[header.chunk_id]) for header, _ in found}
    try:
        await repository.adopt(record.id, list(chunks.values()), segments, points)
    except ManifestConflict as error:
        log.warning("kv_not_taken_up", session=record.id, **fault(error))
        return []
    return segments


def _hole(record: SessionRecord, manifest: Manifest, after: Sequence[Span] = ()) -> int | None:
    """The first ledger position that the session holds and of which nothing is stored, nor in ``after``."""
    stored = union([*(segment.span for segment in manifest.segments), *after])
    return next((rest.start for kept in record.held.kept for rest in without(kept, stored)), None)


def _found(
    record: SessionRecord, ledger: array[int], manifest: Manifest, spare: _Spare, salts: TenantSalts
) -> tuple[list[tuple[ChunkHeader, Span]], int]:
    """Chunks, and what of them, that fill its holes from the first on, and up to where then is none.

    For a session that evicts: all of them or nothing.
    """
    salt, digest = salts.salt(record.tenant), salts.digest(record.tenant)
    held = record.held
    found: list[tuple[ChunkHeader, Span]] = []
    while (at := _hole(record, manifest, [span for _, span in found])) is not None:
        taken = [*(segment.span for segment in manifest.segments), *(span for _, span in found)]
        before = max((span.stop for span in taken if span.stop <= at), default=0)
        after = min((span.start for span in taken if span.start > at), default=record.kv_length)
        fits = (
            header
            for header in spare.covering(at)
            if header.tenant == digest
            and header.kv_fingerprint == record.kv_fingerprint
            and header.position_base == held.position_of(header.start)
            and _is_of(header, ledger, min(header.stop, after))
            and _may_serve(header, record, salt)
        )
        if (header := next(fits, None)) is None:
            return (found, at) if record.placement is None else ([], 0)
        found.append((header, header.span.intersect(Span(before, after))))
    return sorted(found, key=lambda pair: pair[1]), record.kv_length


def _is_of(header: ChunkHeader, ledger: array[int], stop: int) -> bool:
    """Whether the chunk's ids, up to ``stop``, and all before them are the ledger's."""
    ids = ids_bytes(ledger[header.start : stop])
    return header.token_ids[: len(ids)] == ids and (
        header.chain_start == LedgerChain().extend(ledger[: header.start]).digest()
    )


def _may_serve(header: ChunkHeader, record: SessionRecord, salt: bytes) -> bool:
    """A session that is kept exactly takes only chunks that no lossy codec or layout took part in, or that were
    imported with it; another one also those of its own codec. What ``auto`` stands for is not known here: within its
    gate any will do."""
    if record.idle_codec not in set(CODECS):
        return True
    layouts = "+".join(header.ancestors)
    qualities = {"", imported_quality(record.id)}
    if not CODECS.get(record.idle_codec).exact:
        qualities |= {layouts, "+".join(filter(None, (layouts, record.idle_codec)))}
    return header.lookup_key in {
        lookup_key(
            salt,
            header.kv_fingerprint,
            start=header.start,
            stop=header.stop,
            chain=header.chain,
            lineage=header.lineage,
            quality=quality,
        )
        for quality in qualities
    }


def _points(record: SessionRecord, found: Sequence[tuple[ChunkHeader, Span]], reached: int) -> list[ResumePoint]:
    if record.placement is not None:
        return [ResumePoint(reached, "commit", record.placement)] if reached == record.kv_length else []
    points = {p for header, span in found for p in header.resume_points if span.start < p <= span.stop}
    if reached == record.kv_length:
        points.add(reached)
    return [ResumePoint(p, "prefix" if p == record.pinned else "commit") for p in sorted(points)]


def _chunk_record(header: ChunkHeader, record: SessionRecord, nbytes: int) -> ChunkRecord:
    return ChunkRecord(
        header.chunk_id, header.lookup_key, record.tenant, header.kv_fingerprint, header.span, header.codec, nbytes
    )
