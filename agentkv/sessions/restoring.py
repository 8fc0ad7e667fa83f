"""From a manifest back to live KV, verified; whatever cannot be used is left to a recompute.

Chunks are read, checked and decoded in parallel, straight into the buffers of a new state that nobody sees until it is
complete. The first faulty segment ends what is usable; the state then holds the last resume point before it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal

from agentkv.codecs import KVBlock
from agentkv.errors import ChunkFault
from agentkv.kv.contract import Layout, SequenceKV
from agentkv.kv.staging import pinned_like, to_device
from agentkv.sessions.db.records import Manifest, SegmentRecord
from agentkv.storage.blobs import BlobStore, Buffer, Scratch
from agentkv.storage.chunkfile import ChunkHeader, check, decode_part, read_header
from agentkv.storage.host import HostTier
from agentkv.storage.naming import LedgerChain
from agentkv.types import KVGeometry, Placement, Span

__all__ = ["ChunkReader", "Restored"]

logger = logging.getLogger(__name__)

_ALTERED = frozenset({"checksum", "truncated", "format", "decode", "geometry", "unreadable"})
"""Faults that lie in the file itself: it is moved aside. The others may serve another model or session."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A state built to the side, holding ledger ``[0, kv.length)``.

    ``fault``: why it ends before the manifest does; ``None`` if it does not. ``usable``: tokens of the manifest before
    the first faulty segment.
    """

    kv: SequenceKV
    source: Literal["host", "disk"]
    codecs: tuple[str, ...]
    fault: ChunkFault | None
    usable: int


class _PerThread(threading.local):
    """Each worker's own read buffer: a chunk is decoded before the next one is read."""

    def __init__(self) -> None:
        self.scratch = Scratch()


class ChunkReader:
    """Restores sessions of one model for one tenant. Blocking work runs in ``executor``."""

    def __init__(
        self,
        blobs: BlobStore,
        host: HostTier,
        executor: Executor,
        layout: Layout[Any],
        *,
        kv_fingerprint: str,
        tenant_digest: str,
    ) -> None:
        self._blobs = blobs
        self._host = host
        self._executor = executor
        self._layout = layout
        self._geometry: KVGeometry = layout.geometry
        self._fingerprint = kv_fingerprint
        self._tenant = tenant_digest
        self._per_thread = _PerThread()
        self._windows = [g.window for g in layout.geometry.groups]

    async def restore(self, manifest: Manifest, ledger: array[int], room: int) -> Restored:
        """Build the state at the manifest's last resume point, or the last one that is intact.

        ``room``: tokens to reserve beyond. Chunks are looked for in host memory, then on disk.
        """
        fault: ChunkFault | None = None
        usable = manifest.length
        while True:
            point = self._resume_point(manifest, usable)
            wanted = [s for s in manifest.segments if s.span.start < point]
            attempt = await self._attempt(wanted, ledger, point, room)
            if attempt.fault is None:
                return Restored(attempt.kv, attempt.source, attempt.codecs, fault, usable)
            fault, usable = attempt.fault, attempt.usable
            if all(window is None for window in self._windows):
                # Every prefix of full attention is a state: keep what is decoded.
                attempt.kv.restored(ledger[:usable])
                return Restored(attempt.kv, attempt.source, attempt.codecs, fault, usable)
            attempt.kv.close()

    def _resume_point(self, manifest: Manifest, usable: int) -> int:
        if all(window is None for window in self._windows):
            return usable
        return max((p.position for p in manifest.resume_points if p.position <= usable), default=0)

    async def _attempt(
        self,
        segments: Sequence[SegmentRecord],
        ledger: array[int],
        point: int,
        room: int,
    ) -> Restored:
        kv = self._layout.open()
        kv.place(Placement.whole(point), room)
        chains = _chain_starts(ledger, segments)
        loop = asyncio.get_running_loop()
        try:
            results = await asyncio.gather(
                *(
                    loop.run_in_executor(self._executor, self._segment, kv, segment, chain, ledger, point)
                    for segment, chain in zip(segments, chains, strict=True)
                )
            )
        except BaseException:
            # Workers may still be writing into the buffers; they hold them, and nobody else will.
            kv.close()
            raise
        fault, usable = None, point
        for segment, outcome in zip(segments, results, strict=True):
            if isinstance(outcome, ChunkFault):
                fault, usable = outcome, segment.span.start
                break
        good = [outcome for outcome in results if isinstance(outcome, _Read)]
        if fault is None and (hole := self._hole(good, point)) is not None:
            fault, usable = hole
        if fault is None:
            kv.restored(ledger[:point])
        source: Literal["host", "disk"] = "host" if good and all(r.from_memory for r in good) else "disk"
        codecs = tuple(sorted({r.header.codec for r in good}))
        return Restored(kv, source, codecs, fault, usable)

    def _segment(
        self,
        kv: SequenceKV,
        segment: SegmentRecord,
        chain: str,
        ledger: array[int],
        point: int,
    ) -> _Read | ChunkFault:
        """Read, check and decode one segment. A fault is an answer here, not an exception."""
        name = segment.chunk_id
        try:
            held = self._host.get(name)
            buffer: Buffer = self._blobs.read_into(name, self._per_thread.scratch) if held is None else held
            header = read_header(buffer, name)
            stop = min(segment.span.stop, point)
            check(
                header,
                kv_fingerprint=self._fingerprint,
                geometry=self._geometry,
                span=Span(segment.span.start, header.stop),
                ids=ledger[segment.span.start : stop],
                chain_start=chain,
                tenant=self._tenant,
            )
            covered = self._decode(kv, buffer, header, segment.span.start, stop, point)
            return _Read(header, held is not None, covered)
        except ChunkFault as fault:
            if fault.reason in _ALTERED:
                self._blobs.quarantine(name, fault.reason)
                self._host.discard(name)
            return fault

    def _decode(
        self, kv: SequenceKV, buffer: Buffer, header: ChunkHeader, start: int, stop: int, point: int
    ) -> list[tuple[int, Span]]:
        covered = []
        for index, part in enumerate(header.parts):
            window = self._windows[part.group]
            needed = Span(start if window is None else max(start, point - window), stop)
            span = part.span.intersect(needed)
            if not len(span):
                continue
            target = kv.target(part.group, span)
            if span == part.span and not target.keys[0].is_cuda:
                decode_part(buffer, header, index, target)
            else:
                _decode_aside(buffer, header, index, target, part.span, span)
            covered.append((part.group, span))
        return covered

    def _hole(self, reads: Sequence[_Read], point: int) -> tuple[ChunkFault, int] | None:
        """Whether some group lacks keys that a query at ``point`` sees."""
        for group, window in enumerate(self._windows):
            at = 0 if window is None else max(0, point - window)
            for read in reads:
                for covered_group, span in read.covered:
                    if covered_group == group and span.start <= at < span.stop:
                        at = span.stop
            if at < point:
                name = self._geometry.groups[group].name
                return ChunkFault("-", "missing", f"{name} has no keys at {at}, needed at {point}"), point - 1
        return None


@dataclass(frozen=True, slots=True)
class _Read:
    header: ChunkHeader
    from_memory: bool
    covered: list[tuple[int, Span]]


def _decode_aside(buffer: Buffer, header: ChunkHeader, index: int, target: KVBlock, whole: Span, span: Span) -> None:
    """Decode a whole part to the side, then copy the wanted tokens: for shortened segments, and for devices."""

    block = pinned_like(target, len(whole))
    decode_part(buffer, header, index, block)
    lo, hi = span.start - whole.start, span.stop - whole.start
    wanted = KVBlock(tuple(t[:, lo:hi] for t in block.keys), tuple(t[:, lo:hi] for t in block.values))
    if target.keys[0].is_cuda:
        to_device(wanted, target)
        return
    for source, into in zip((*wanted.keys, *wanted.values), (*target.keys, *target.values), strict=True):
        into.copy_(source)


def _chain_starts(ledger: array[int], segments: Sequence[SegmentRecord]) -> list[str]:
    chain = LedgerChain()
    starts = []
    for segment in segments:
        starts.append(chain.digest())
        chain.extend(ledger[segment.span.start : segment.span.stop])
    return starts
