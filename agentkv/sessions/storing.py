"""Write-behind: live KV to chunk files, then to the manifest.

A turn that ends at ``r`` stores the tokens that the manifest does not have yet. Cuts, on the ledger::

    0          pinned                             r
    |  chunk   |  chunk (256)  | … |  chunk (≤256) |
               ^ resume point                      ^ resume point

Full groups are stored for every token that is held. Sliding groups only where a chunk overlaps the window before a
resume point; what overlaps several windows is stored once, from the latest. What a policy evicted is not stored any
more: chunks end at its borders, and where positions jump.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from blake3 import blake3

from agentkv.codecs import CODECS, KVBlock
from agentkv.errors import StorageError
from agentkv.kv.contract import CapturedPart, SequenceKV
from agentkv.sessions.db.records import ChunkCondemned, ChunkRecord, Manifest, ResumePoint, SegmentRecord
from agentkv.sessions.db.repository import Repository
from agentkv.storage.blobs import BlobStore
from agentkv.storage.chunkfile import MAX_CHUNK_TOKENS, ChunkMeta, EncodedChunk, Part, encode_chunk
from agentkv.storage.faultpoints import fault_point
from agentkv.storage.naming import LedgerChain, ids_bytes, lookup_key
from agentkv.types import KVGeometry, Placement, Span

__all__ = ["ChunkWriter", "Snapshot", "StoreReport", "chunk_spans", "take_snapshot"]

logger = logging.getLogger(__name__)

_BATCH = 8
"""Chunks encoded and synced together: bounds the encoded bytes in memory, and the work a crash can lose."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """KV of ``span`` as it was at the end of a turn, safe to read while the session goes on.

    ``ids``: the ledger up to ``span.stop``. ``full``: what the full groups hold of ``span`` (views). ``windows``: the
    sliding groups (copies) before each resume point; ``kinds`` names those points. ``placement``: of the whole state.
    """

    span: Span
    ids: array[int]
    full: tuple[CapturedPart, ...]
    windows: Mapping[int, tuple[CapturedPart, ...]]
    kinds: Mapping[int, str]
    pinned: int
    placement: Placement

    def spans(self) -> list[Span]:
        """Its chunks, in ledger order."""
        return list(chunk_spans(self, self.pinned))

    def points(self) -> list[ResumePoint]:
        """Its resume points, in order."""
        last = None if self.placement.trivial else self.placement
        return sorted(ResumePoint(p, kind, last if p == self.span.stop else None) for p, kind in self.kinds.items())

    def needed(self) -> list[Span]:
        """What must stay stored to restore its last resume point, full and sliding groups."""
        windows = [part.span for part in self.windows[self.span.stop]]
        return [*self.placement.kept, *windows]

    def manifest(self, chunk_ids: Sequence[str]) -> Manifest:
        """What its chunks, in ledger order, add to a manifest."""
        segments = tuple(SegmentRecord(name, span) for name, span in zip(chunk_ids, self.spans(), strict=True))
        return Manifest(segments, tuple(self.points()))


@dataclass(frozen=True, slots=True)
class StoreReport:
    """New chunks and their bytes on disk; ``stop``: ledger tokens that the manifest covers now."""

    chunks: int
    nbytes: int
    stop: int


def take_snapshot(
    kv: SequenceKV, stored: int, pinned: int, early: Mapping[int, tuple[CapturedPart, ...]]
) -> Snapshot | None:
    """What of ``kv`` lies behind ``stored``; ``None`` when nothing does. Call while no turn runs on the session.

    ``early``: windows captured when the prefill passed a resume point that is not stored yet. Where something before
    the point was evicted since, there is nothing to resume from.
    """
    span = Span(stored, kv.length)
    if not len(span):
        return None
    whole = next((kept.stop for kept in kv.placement.kept if kept.start == 0), 0)
    windows = {point: parts for point, parts in early.items() if stored < point <= whole}
    windows[span.stop] = kv.window_snapshot()
    kinds = dict.fromkeys(windows, "prefix") | {span.stop: "commit"}
    return Snapshot(span, array("i", kv.ids), kv.capture(span), windows, kinds, pinned, kv.placement)


def chunk_spans(snapshot: Snapshot, pinned: int) -> Iterator[Span]:
    """What is stored, cut into chunks of at most 256 tokens.

    The pinned prefix ends its own chunk. A chunk is held by all full groups or by none, and its positions are
    consecutive.
    """
    span, placement = snapshot.span, snapshot.placement
    held = [kept.intersect(span) for kept in placement.kept]
    sliding = [part.span.intersect(span) for parts in snapshot.windows.values() for part in parts]
    cuts = {pinned} | {border for part in held for border in part}
    for run in placement.runs(_union([*held, *sliding])):
        inner = sorted(cut for cut in cuts if run.start < cut < run.stop)
        for start, stop in zip([run.start, *inner], [*inner, run.stop], strict=True):
            yield from Span(start, stop).split(MAX_CHUNK_TOKENS)


def _union(spans: Sequence[Span]) -> list[Span]:
    """The same positions in as few spans as possible, in order."""
    found: list[Span] = []
    for span in sorted(span for span in spans if len(span)):
        if found and span.start <= found[-1].stop:
            found[-1] = Span(found[-1].start, max(found[-1].stop, span.stop))
        else:
            found.append(span)
    return found


def _slice(part: CapturedPart, span: Span) -> Part:
    lo, hi = span.start - part.span.start, span.stop - part.span.start
    keys = tuple(t[:, lo:hi] for t in part.block.keys)
    values = tuple(t[:, lo:hi] for t in part.block.values)
    return Part(part.group, span, KVBlock(keys, values))


def _parts(snapshot: Snapshot, span: Span) -> list[Part]:
    """The parts of the chunk ``span``, by group and in ledger order."""
    parts = [_slice(part, span) for part in snapshot.full if part.span.intersect(span) == span]
    covered: dict[int, int] = {}
    for point in sorted(snapshot.windows, reverse=True):
        for captured in snapshot.windows[point]:
            limit = covered.get(captured.group, span.stop)
            wanted = captured.span.intersect(Span(span.start, limit))
            if len(wanted):
                parts.append(_slice(captured, wanted))
                covered[captured.group] = wanted.start
    return sorted(parts, key=lambda part: (part.group, part.span))


class ChunkWriter:
    """Encodes, writes and lists chunks of one model for one tenant. Blocking work runs in ``executor``."""

    def __init__(
        self,
        repository: Repository,
        blobs: BlobStore,
        executor: Executor,
        *,
        geometry: KVGeometry,
        kv_fingerprint: str,
        salt: bytes,
        tenant: str,
    ) -> None:
        self._repository = repository
        self._blobs = blobs
        self._executor = executor
        self._geometry = geometry
        self._fingerprint = kv_fingerprint
        self._salt = salt
        self._tenant = tenant
        self.tenant_digest = blake3(salt).hexdigest()[:40]
        self._collecting = asyncio.Lock()

    def encode(self, snapshot: Snapshot, span: Span, chain: tuple[str, str], codec: str) -> EncodedChunk:
        """One chunk, in memory. Blocking."""
        placement = snapshot.placement
        key = lookup_key(
            self._salt,
            self._fingerprint,
            start=span.start,
            stop=span.stop,
            chain=chain[1],
            lineage=placement.lineage,
        )
        meta = ChunkMeta(
            kv_fingerprint=self._fingerprint,
            tenant=self.tenant_digest,
            lookup_key=key,
            geometry=self._geometry,
            span=span,
            chain_start=chain[0],
            chain=chain[1],
            ids=ids_bytes(snapshot.ids[span.start : span.stop]),
            position_base=placement.position_of(span.start),
            lineage=placement.lineage,
            resume_points=tuple(sorted(p for p in snapshot.windows if span.start < p <= span.stop)),
        )
        return encode_chunk(meta, _parts(snapshot, span), CODECS.get(codec))

    async def encoded(self, snapshot: Snapshot, codec: str) -> list[EncodedChunk]:
        """All chunks of a snapshot, in ledger order, without writing them."""
        loop = asyncio.get_running_loop()
        spans = snapshot.spans()
        chains = _chains(snapshot.ids, spans)
        jobs = [
            loop.run_in_executor(self._executor, self.encode, snapshot, span, chain, codec)
            for span, chain in zip(spans, chains, strict=True)
        ]
        return list(await asyncio.gather(*jobs))

    async def store(self, session_id: str, snapshot: Snapshot, codec: str) -> StoreReport:
        """Write the snapshot's chunks and append them to the session's manifest.

        A few chunks at a time: files first, durable, then one transaction. Raises ``StorageFull``, ``StorageError`` or
        ``DatabaseUnavailable``; what was appended before stays valid.
        """
        loop = asyncio.get_running_loop()
        spans = snapshot.spans()
        chains = _chains(snapshot.ids, spans)
        chunks = nbytes = 0
        for first in range(0, len(spans), _BATCH):
            batch = [
                loop.run_in_executor(self._executor, self.encode, snapshot, span, chain, codec)
                for span, chain in zip(spans[first : first + _BATCH], chains[first : first + _BATCH], strict=True)
            ]
            encoded = await asyncio.gather(*batch)
            fault_point("store.encoded")
            await loop.run_in_executor(self._executor, self._put, encoded)
            fault_point("store.before_manifest")
            last = first + _BATCH >= len(spans)
            await self._append(session_id, encoded, snapshot.points(), snapshot.span.stop if last else None)
            fault_point("store.after_manifest")
            chunks += len(encoded)
            nbytes += sum(chunk.nbytes for chunk in encoded)
        if not spans:
            await self._repository.append_segments(session_id, [], [], snapshot.points())
        if not snapshot.placement.trivial:
            await self._prune(session_id, snapshot)
        return StoreReport(chunks, nbytes, snapshot.span.stop)

    async def _prune(self, session_id: str, snapshot: Snapshot) -> None:
        """What the session has evicted needs no disk any more."""
        if await self._repository.prune_manifest(session_id, snapshot.needed(), snapshot.span.stop):
            try:
                await self.collect_garbage()
            except StorageError as error:
                logger.error("unneeded chunks of session %s could not be deleted yet: %s", session_id, error)

    def _put(self, encoded: Sequence[EncodedChunk]) -> None:
        self._blobs.put_many([(chunk.id, chunk.buffers) for chunk in encoded])

    async def _append(
        self, session_id: str, encoded: Sequence[EncodedChunk], points: Sequence[ResumePoint], stop: int | None
    ) -> None:
        """``stop``: where the snapshot ends, with its last chunks."""
        records = [
            ChunkRecord(
                chunk.id,
                chunk.header.lookup_key,
                self._tenant,
                self._fingerprint,
                chunk.header.span,
                chunk.header.codec,
                chunk.nbytes,
            )
            for chunk in encoded
        ]
        segments = [SegmentRecord(chunk.id, chunk.header.span) for chunk in encoded]
        reached = Span(encoded[0].header.start, encoded[-1].header.stop)
        points = [p for p in points if reached.start < p.position <= reached.stop or p.position == stop]
        try:
            await self._repository.append_segments(session_id, records, segments, points)
        except ChunkCondemned:
            # The same bytes were being deleted. Finish that deletion, then write them again.
            await self.collect_garbage()
            await asyncio.get_running_loop().run_in_executor(self._executor, self._put, encoded)
            await self._repository.append_segments(session_id, records, segments, points)

    async def collect_garbage(self) -> int:
        """Delete the files of chunks that no manifest names any more. Returns the bytes freed.

        One at a time: a second collector would claim the first one's chunks as left over by a crash, and delete them
        after they were forgotten and perhaps written anew.
        """
        loop = asyncio.get_running_loop()
        freed = 0
        async with self._collecting:
            while claimed := await self._repository.claim_garbage(100):
                freed += await loop.run_in_executor(self._executor, self._delete, claimed)
                fault_point("gc.before_forget")
                await self._repository.forget_chunks(claimed)
        return freed

    def _delete(self, names: Sequence[str]) -> int:
        before = self._blobs.used_bytes()
        for name in names:
            self._blobs.delete(name)
        return before - self._blobs.used_bytes()


def _chains(ids: array[int], spans: Sequence[Span]) -> list[tuple[str, str]]:
    """Ledger chain hashes at the start and stop of each of ``spans``, which are in order."""
    chain = LedgerChain()
    pairs = []
    before = chain.digest()
    for span in spans:
        if chain.tokens < span.start:
            before = chain.extend(ids[chain.tokens : span.start]).digest()
        after = chain.extend(ids[span.start : span.stop]).digest()
        pairs.append((before, after))
        before = after
    return pairs
