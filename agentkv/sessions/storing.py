"""Write-behind: live KV to chunk files, then to the manifest.

A turn that ends at ``r`` stores the tokens that the manifest does not have yet. Cuts, on the ledger::

    0          pinned                             r
    |  chunk   |  chunk (256)  | … |  chunk (≤256) |
               ^ resume point                      ^ resume point

Full groups are stored for every token. Sliding groups only where a chunk overlaps the window before a resume point;
what overlaps several windows is stored once, from the latest.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from blake3 import blake3

from agentkv.codecs import CODECS, KVBlock
from agentkv.kv.contract import CapturedPart, SequenceKV
from agentkv.sessions.db.records import ChunkCondemned, ChunkRecord, Manifest, ResumePoint, SegmentRecord
from agentkv.sessions.db.repository import Repository
from agentkv.storage.blobs import BlobStore
from agentkv.storage.chunkfile import MAX_CHUNK_TOKENS, ChunkMeta, EncodedChunk, Part, encode_chunk
from agentkv.storage.faultpoints import fault_point
from agentkv.storage.naming import LedgerChain, ids_bytes, lookup_key
from agentkv.types import KVGeometry, Span

__all__ = ["ChunkWriter", "Snapshot", "StoreReport", "chunk_spans", "take_snapshot"]

_BATCH = 8
"""Chunks encoded and synced together: bounds the encoded bytes in memory, and the work a crash can lose."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """KV of ``span`` as it was at the end of a turn, safe to read while the session goes on.

    ``ids``: the ledger up to ``span.stop``. ``full``: the full groups over ``span`` (views). ``windows``: the sliding
    groups (copies) before each resume point; ``kinds`` names those points.
    """

    span: Span
    ids: array[int]
    full: tuple[CapturedPart, ...]
    windows: Mapping[int, tuple[CapturedPart, ...]]
    kinds: Mapping[int, str]
    pinned: int

    def manifest(self, chunk_ids: Sequence[str]) -> Manifest:
        """What its chunks, in ledger order, add to a manifest."""
        spans = chunk_spans(self.span, self.pinned)
        segments = tuple(SegmentRecord(name, span) for name, span in zip(chunk_ids, spans, strict=True))
        return Manifest(segments, tuple(sorted(ResumePoint(p, kind) for p, kind in self.kinds.items())))


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

    ``early``: windows captured when the prefill passed a resume point that is not stored yet.
    """
    span = Span(stored, kv.length)
    if not len(span):
        return None
    windows = {point: parts for point, parts in early.items() if point > stored}
    windows[span.stop] = kv.window_snapshot()
    kinds = dict.fromkeys(windows, "prefix") | {span.stop: "commit"}
    return Snapshot(span, array("i", kv.ids), kv.capture(span), windows, kinds, pinned)


def chunk_spans(span: Span, pinned: int) -> Iterator[Span]:
    """Where ``span`` is cut: the pinned prefix ends its own chunk, no chunk is longer than 256 tokens."""
    if span.start < pinned < span.stop:
        yield from Span(span.start, pinned).split(MAX_CHUNK_TOKENS)
        yield from Span(pinned, span.stop).split(MAX_CHUNK_TOKENS)
    else:
        yield from span.split(MAX_CHUNK_TOKENS)


def _slice(part: CapturedPart, span: Span) -> Part:
    lo, hi = span.start - part.span.start, span.stop - part.span.start
    keys = tuple(t[:, lo:hi] for t in part.block.keys)
    values = tuple(t[:, lo:hi] for t in part.block.values)
    return Part(part.group, span, KVBlock(keys, values))


def _parts(snapshot: Snapshot, span: Span) -> list[Part]:
    """The parts of the chunk ``span``, by group and in ledger order."""
    parts = [_slice(part, span) for part in snapshot.full]
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

    def encode(self, snapshot: Snapshot, span: Span, chain: tuple[str, str], codec: str) -> EncodedChunk:
        """One chunk, in memory. Blocking."""
        key = lookup_key(self._salt, self._fingerprint, start=span.start, stop=span.stop, chain=chain[1])
        meta = ChunkMeta(
            kv_fingerprint=self._fingerprint,
            tenant=self.tenant_digest,
            lookup_key=key,
            geometry=self._geometry,
            span=span,
            chain_start=chain[0],
            chain=chain[1],
            ids=ids_bytes(snapshot.ids[span.start : span.stop]),
            position_base=span.start,
            resume_points=tuple(sorted(p for p in snapshot.windows if span.start < p <= span.stop)),
        )
        return encode_chunk(meta, _parts(snapshot, span), CODECS.get(codec))

    async def encoded(self, snapshot: Snapshot, codec: str) -> list[EncodedChunk]:
        """All chunks of a snapshot, in ledger order, without writing them."""
        loop = asyncio.get_running_loop()
        spans = list(chunk_spans(snapshot.span, snapshot.pinned))
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
        spans = list(chunk_spans(snapshot.span, snapshot.pinned))
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
            await self._append(session_id, encoded, snapshot.kinds)
            fault_point("store.after_manifest")
            chunks += len(encoded)
            nbytes += sum(chunk.nbytes for chunk in encoded)
        return StoreReport(chunks, nbytes, snapshot.span.stop)

    def _put(self, encoded: Sequence[EncodedChunk]) -> None:
        self._blobs.put_many([(chunk.id, chunk.buffers) for chunk in encoded])

    async def _append(self, session_id: str, encoded: Sequence[EncodedChunk], kinds: Mapping[int, str]) -> None:
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
        points = [ResumePoint(p, kind) for p, kind in kinds.items() if reached.start < p <= reached.stop]
        try:
            await self._repository.append_segments(session_id, records, segments, points)
        except ChunkCondemned:
            # The same bytes were being deleted. Finish that deletion, then write them again.
            await self.collect_garbage()
            await asyncio.get_running_loop().run_in_executor(self._executor, self._put, encoded)
            await self._repository.append_segments(session_id, records, segments, points)

    async def collect_garbage(self) -> int:
        """Delete the files of chunks that no manifest names any more. Returns the bytes freed."""
        loop = asyncio.get_running_loop()
        freed = 0
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
    """Ledger chain hashes at the start and stop of each of the consecutive ``spans``."""
    chain = LedgerChain()
    chain.extend(ids[: spans[0].start])
    pairs = []
    before = chain.digest()
    for span in spans:
        after = chain.extend(ids[span.start : span.stop]).digest()
        pairs.append((before, after))
        before = after
    return pairs
