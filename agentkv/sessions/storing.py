"""Snapshots to chunk files, then to the manifest; and the files that nobody needs any more."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from agentkv.codecs import CODECS, Codec, Codecs
from agentkv.errors import DatabaseUnavailable, StorageError, StorageFull
from agentkv.logs import Log, fault
from agentkv.sessions.db.records import ChunkCondemned, ChunkRecord, Manifest, SegmentRecord, SessionRecord
from agentkv.sessions.db.repository import Repository
from agentkv.sessions.quotas import Quotas
from agentkv.sessions.snapshots import Snapshot
from agentkv.storage.blobs import BlobStore
from agentkv.storage.chunkfile import ChunkHeader, ChunkMeta, EncodedChunk, encode_chunk
from agentkv.storage.faultpoints import fault_point
from agentkv.storage.naming import LedgerChain, TenantSalts, ids_bytes, imported_quality, lookup_key
from agentkv.types import KVGeometry, Span

__all__ = ["ChunkWriter", "StoreReport", "chains"]

log = Log(__name__)

_BATCH = 8
"""Chunks encoded and synced together: bounds the encoded bytes in memory, and the work a crash can lose."""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """New chunks and their bytes on disk; ``stop``: ledger tokens that the manifest covers now."""

    chunks: int
    nbytes: int
    stop: int


class ChunkWriter:
    """Encodes, writes and lists chunks of one model. Blocking work runs in ``executor``."""

    def __init__(
        self,
        repository: Repository,
        blobs: BlobStore,
        executor: Executor,
        *,
        geometry: KVGeometry,
        kv_fingerprint: str,
        salts: TenantSalts,
        codecs: Codecs,
        auto: str,
        layout: str = "",
    ) -> None:
        """``auto``: the codec that ``"auto"`` stands for. ``layout``: the live layout's name where it is lossy."""
        self._repository = repository
        self._blobs = blobs
        self.executor = executor
        self.geometry = geometry
        self.kv_fingerprint = kv_fingerprint
        self.salts = salts
        self.codecs = codecs
        self.auto = auto
        self._layout = layout
        self.quotas = Quotas(repository, kv_fingerprint, self.collect_garbage)
        self._collecting = asyncio.Lock()
        self._spared: Counter[str] = Counter()

    def codec(self, name: str) -> Codec:
        """What a session's ``idle_codec`` stands for. ``InvalidRequest`` lists the known ones."""
        return self.codecs.encoder(self.auto if name == "auto" else name)

    def sealed(self, manifest: Manifest) -> int:
        """Where the last chunk ends that a lossy codec has encoded; 0 where none has."""
        return max((s.span.stop for s in manifest.segments if self._lossy(s.codec)), default=0)

    @staticmethod
    def _lossy(name: str) -> bool:
        # Of a codec that is not installed any more nothing better can be assumed.
        return name not in set(CODECS) or not CODECS.get(name).exact

    def key(self, tenant: str, span: Span, chain: str, codec: Codec, lineage: str = "") -> str:
        """The lookup key of a tenant's chunk; ``chain``: the ledger's chain hash at its end.

        What a lossy codec or layout took part in is never taken for exact KV of the same tokens.
        """
        quality = "+".join(filter(None, (self._layout, "" if codec.exact else codec.name)))
        return lookup_key(
            self.salts.salt(tenant),
            self.kv_fingerprint,
            start=span.start,
            stop=span.stop,
            chain=chain,
            lineage=lineage,
            quality=quality,
        )

    def imported_key(self, header: ChunkHeader, record: SessionRecord) -> str:
        """The lookup key of a chunk that came with a session from another home: no other session ever looks for it."""
        return lookup_key(
            self.salts.salt(record.tenant),
            header.kv_fingerprint,
            start=header.start,
            stop=header.stop,
            chain=header.chain,
            lineage=header.lineage,
            quality=imported_quality(record.id),
        )

    def encode(self, record: SessionRecord, snapshot: Snapshot, span: Span, chain: tuple[str, str]) -> EncodedChunk:
        """One chunk of a session, in memory. Blocking."""
        placement, codec = snapshot.placement, self.codec(record.idle_codec)
        lossless = codec if codec.exact else self.codecs.encoder("exact")
        # What lies before the first gap was computed before anything was evicted.
        lineage = "" if span.stop <= placement.whole_prefix else placement.lineage
        meta = ChunkMeta(
            kv_fingerprint=self.kv_fingerprint,
            tenant=self.salts.digest(record.tenant),
            lookup_key=self.key(record.tenant, span, chain[1], codec, lineage),
            geometry=self.geometry,
            span=span,
            chain_start=chain[0],
            chain=chain[1],
            ids=ids_bytes(snapshot.ids[span.start : span.stop]),
            position_base=placement.position_of(span.start),
            lineage=lineage,
            resume_points=tuple(sorted(p for p in snapshot.windows if span.start < p <= span.stop)),
            ancestors=(self._layout,) if self._layout else (),
        )
        return encode_chunk(meta, snapshot.parts(span, codec, lossless), codec if span in snapshot.sealed else lossless)

    async def encoded(self, record: SessionRecord, snapshot: Snapshot) -> list[EncodedChunk]:
        """All chunks of a snapshot, in ledger order, without writing them."""
        loop = asyncio.get_running_loop()
        spans = snapshot.spans()
        pairs = chains(snapshot.ids, spans)
        jobs = [
            loop.run_in_executor(self.executor, self.encode, record, snapshot, span, chain)
            for span, chain in zip(spans, pairs, strict=True)
        ]
        return list(await asyncio.gather(*jobs))

    async def store(self, record: SessionRecord, snapshot: Snapshot) -> StoreReport:
        """Write the snapshot's chunks and append them to the manifest of the session that ``record`` names.

        A few chunks at a time: files first, durable, then one transaction. Raises ``StorageFull`` (``QuotaReached``
        where the tenant's own is), ``StorageError`` or ``DatabaseUnavailable``; what was appended before stays valid.
        """
        loop = asyncio.get_running_loop()
        spans = snapshot.spans()
        pairs = chains(snapshot.ids, spans)
        written = nbytes = 0
        replaced: list[str] = []
        # Where a resume point goes for another, both happen in one transaction.
        size = _BATCH if snapshot.void() is None else max(1, len(spans))
        for first in range(0, len(spans), size):
            batch = [
                loop.run_in_executor(self.executor, self.encode, record, snapshot, span, chain)
                for span, chain in zip(spans[first : first + size], pairs[first : first + size], strict=True)
            ]
            encoded = await asyncio.gather(*batch)
            fault_point("store.encoded")
            last = first + size >= len(spans)
            async with self.quotas.room(record.tenant, {chunk.id: chunk.nbytes for chunk in encoded}):
                await self.put(encoded)
                fault_point("store.before_manifest")
                replaced += await self._append(record, encoded, snapshot, last)
            fault_point("store.after_manifest")
            written += len(encoded)
            nbytes += sum(chunk.nbytes for chunk in encoded)
        if not spans:
            await self._repository.append_segments(record.id, [], [], snapshot.points())
        if not snapshot.placement.trivial:
            # What the session has evicted needs no disk any more.
            replaced += await self._repository.prune_manifest(record.id, snapshot.needed(), snapshot.span.stop)
        if replaced:
            await self.try_collecting(record.id)
        return StoreReport(written, nbytes, snapshot.span.stop)

    async def try_collecting(self, session_id: str) -> int:
        """``collect_garbage``; trouble is logged: the files go another time. Returns the bytes freed."""
        try:
            return await self.collect_garbage()
        except (StorageError, DatabaseUnavailable) as error:
            log.error("chunks_not_deleted", session=session_id, **fault(error))
            return 0

    async def put(self, encoded: Sequence[EncodedChunk]) -> None:
        """The files, durable. Where they do not fit, KV of other models makes room, the longest unused first."""
        items = [(chunk.id, chunk.buffers) for chunk in encoded]
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.run_in_executor(self.executor, self._blobs.put_many, items)
                return
            except StorageFull:
                if not await self._repository.release_foreign(self.kv_fingerprint):
                    raise
                log.warning("foreign_kv_makes_room", chunks=len(items))
                await self.collect_garbage()

    async def _append(
        self, record: SessionRecord, encoded: Sequence[EncodedChunk], snapshot: Snapshot, last: bool
    ) -> list[str]:
        """``last``: with the snapshot's last chunks. Returns chunks that nobody needs any more."""
        records = [
            ChunkRecord(
                chunk.id,
                chunk.header.lookup_key,
                record.tenant,
                self.kv_fingerprint,
                chunk.header.span,
                chunk.header.codec,
                chunk.nbytes,
            )
            for chunk in encoded
        ]
        segments = [SegmentRecord(chunk.id, chunk.header.span) for chunk in encoded]
        reached = Span(encoded[0].header.start, encoded[-1].header.stop)
        end = snapshot.span.stop if last else None
        points = [p for p in snapshot.points() if reached.start < p.position <= reached.stop or p.position == end]
        write = partial(self._repository.reseal, record.id, records, segments, points, snapshot.void())
        try:
            replaced = await write()
        except ChunkCondemned:
            # The same bytes were being deleted. Finish that deletion, then write them again.
            await self.collect_garbage()
            await self.put(encoded)
            replaced = await write()
        # Such a deletion may have ended in between, and taken the new file. From here on it cannot be claimed.
        if lost := await asyncio.get_running_loop().run_in_executor(self.executor, self._missing, encoded):
            await self.put(lost)
        return replaced

    def _missing(self, encoded: Sequence[EncodedChunk]) -> list[EncodedChunk]:
        return [chunk for chunk in encoded if not self._blobs.exists(chunk.id)]

    async def collect_garbage(self) -> int:
        """Delete the files of chunks that no manifest names any more. Returns the bytes freed.

        One at a time: a second collector would claim the first one's chunks as left over by a crash, and delete them
        after they were forgotten and perhaps written anew.
        """
        loop = asyncio.get_running_loop()
        freed = 0
        async with self._collecting:
            while claimed := await self._repository.claim_garbage(100, frozenset(self._spared)):
                freed += await loop.run_in_executor(self.executor, self._delete, claimed)
                fault_point("gc.before_forget")
                await self._repository.forget_chunks(claimed)
        return freed

    @contextmanager
    def spared(self, names: Iterable[str]) -> Iterator[None]:
        """Inside, these chunks' files stay, whoever gives them up."""
        mine = Counter(set(names))
        self._spared += mine
        try:
            yield
        finally:
            self._spared -= mine

    def _delete(self, names: Sequence[str]) -> int:
        # Others may be writing: what is used in all would not say what these were.
        freed = 0
        for name in names:
            nbytes = self._blobs.size(name) if self._blobs.exists(name) else 0
            fault_point("gc.before_delete")
            freed += nbytes if self._blobs.delete(name) else 0
        return freed


def chains(ids: array[int], spans: Sequence[Span]) -> list[tuple[str, str]]:
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
