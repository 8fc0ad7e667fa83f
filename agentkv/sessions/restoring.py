"""From a manifest back to live KV, verified; whatever cannot be used is left to a recompute.

Chunks are read, checked and decoded in parallel, straight into the buffers of a new state that nobody sees until it is
complete. The first faulty segment ends what is usable; the state then holds the last resume point before it.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal

from agentkv.codecs import Codecs, KVBlock
from agentkv.errors import ChunkFault
from agentkv.kv.contiguous import copied
from agentkv.kv.contract import Layout, SequenceKV
from agentkv.kv.staging import pinned_like, to_device
from agentkv.sessions.db.records import Manifest, SegmentRecord
from agentkv.sessions.waiting import outlast
from agentkv.storage.blobs import BlobStore, Buffer, Scratch
from agentkv.storage.chunkfile import ChunkHeader, check, decode_part, read_header
from agentkv.storage.host import HostTier
from agentkv.storage.naming import LedgerChain, TenantSalts
from agentkv.types import KVGeometry, Placement, Span

__all__ = ["ChunkReader", "Restored"]

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
    """Restores sessions of one model. Blocking work runs in ``executor``."""

    def __init__(
        self,
        blobs: BlobStore,
        host: HostTier,
        executor: Executor,
        layout: Layout[Any],
        codecs: Codecs,
        *,
        kv_fingerprint: str,
        salts: TenantSalts,
    ) -> None:
        self._blobs = blobs
        self._host = host
        self._executor = executor
        self._layout = layout
        self._codecs = codecs
        self._geometry: KVGeometry = layout.geometry
        self._fingerprint = kv_fingerprint
        self._salts = salts
        self._per_thread = _PerThread()
        self._windows = [g.window for g in layout.geometry.groups]

    async def restore(
        self,
        tenant: str,
        manifest: Manifest,
        ledger: array[int],
        holds: int,
        *,
        limit: int | None = None,
        points: bool = False,
    ) -> Restored:
        """Build the state at the manifest's last resume point, or the last one that is intact.

        ``tenant``: whose chunks these must be. ``holds``: tokens to make room for, those that come back included;
        ``limit``: tokens that the state will ever hold. ``points``: only resume points will do, since the session
        evicts. Chunks are looked for in host memory, then on disk.
        """
        fault: ChunkFault | None = None
        usable = manifest.length
        anywhere = not points and all(window is None for window in self._windows)
        while True:
            placement = Placement.whole(usable) if anywhere else self._last_point(manifest, usable)
            # An old resume point may hold more than the session's limit by now, and a turn may be longer than a window.
            most = None if limit is None else max(limit, placement.tokens)
            free = max(0, (holds if most is None else min(holds, most)) - placement.tokens)
            kv = self._layout.open(0, most)
            attempt = await self._attempt(kv, tenant, manifest, ledger, placement, free)
            if attempt.fault is None:
                return Restored(attempt.kv, attempt.source, attempt.codecs, fault, usable)
            fault, usable = attempt.fault, attempt.usable
            if anywhere:
                # Every prefix of full attention is a state: keep what is decoded.
                attempt.kv.restored(ledger[:usable])
                return Restored(attempt.kv, attempt.source, attempt.codecs, fault, usable)
            attempt.kv.close()

    @staticmethod
    def _last_point(manifest: Manifest, usable: int) -> Placement:
        points = [point for point in manifest.resume_points if point.position <= usable]
        return max(points, key=lambda point: point.position).held if points else Placement()

    def _needed(self, placement: Placement, group: int) -> tuple[Span, ...]:
        """Ledger positions that a state there holds in one layer group."""
        window = self._windows[group]
        if window is None:
            return placement.kept
        start = max(placement.floor, placement.length - window)
        return (Span(start, placement.length),) if start < placement.length else ()

    async def _attempt(
        self,
        kv: SequenceKV,
        tenant: str,
        manifest: Manifest,
        ledger: array[int],
        placement: Placement,
        room: int,
    ) -> Restored:
        needed = [self._needed(placement, group) for group in range(len(self._windows))]
        segments = [
            s for s in manifest.segments if any(len(s.span.intersect(span)) for spans in needed for span in spans)
        ]
        chains, digest = _chain_starts(ledger, segments), self._salts.digest(tenant)
        loop, given_up = asyncio.get_running_loop(), threading.Event()

        def read(segment: SegmentRecord, chain: str) -> _Read | ChunkFault | None:
            return None if given_up.is_set() else self._segment(kv, digest, segment, chain, ledger, placement, needed)

        work: list[asyncio.Future[_Read | ChunkFault | None]] = []
        try:
            kv.place(placement, room)
            pairs = zip(segments, chains, strict=True)
            work += [loop.run_in_executor(self._executor, read, segment, chain) for segment, chain in pairs]
            results = await asyncio.shield(asyncio.gather(*work))
        except BaseException:
            # Nobody else may be given this memory while a worker still writes to it.
            given_up.set()
            if work:
                await outlast(asyncio.wait(work))
            kv.close()
            raise
        fault, usable = None, placement.length
        for segment, outcome in zip(segments, results, strict=True):
            if isinstance(outcome, ChunkFault):
                fault, usable = outcome, segment.span.start
                break
        good = [outcome for outcome in results if isinstance(outcome, _Read)]
        if (hole := self._hole(good, needed)) is not None and (fault is None or hole[1] < usable):
            fault, usable = hole[0], min(hole[1], placement.length - 1)
        if fault is None:
            kv.restored(ledger[: placement.length])
        source: Literal["host", "disk"] = "host" if good and all(r.from_memory for r in good) else "disk"
        codecs = tuple(sorted({part.codec for r in good for part in r.header.parts}))
        return Restored(kv, source, codecs, fault, usable)

    def _segment(
        self,
        kv: SequenceKV,
        tenant: str,
        segment: SegmentRecord,
        chain: str,
        ledger: array[int],
        placement: Placement,
        needed: Sequence[tuple[Span, ...]],
    ) -> _Read | ChunkFault:
        """Read, check and decode one segment of ``tenant`` (a digest). A fault is an answer here, not an exception."""
        name = segment.chunk_id
        try:
            held = self._host.get(name)
            buffer: Buffer = self._blobs.read_into(name, self._per_thread.scratch) if held is None else held
            header = read_header(buffer, name)
            stop = min(segment.span.stop, placement.length)
            if header.start != segment.span.start:  # what was in front of it was sealed since
                chain = LedgerChain().extend(ledger[: header.start]).digest()
            check(
                header,
                kv_fingerprint=self._fingerprint,
                geometry=self._geometry,
                within=segment.span,
                ids=ledger[header.start : stop],
                chain_start=chain,
                tenant=tenant,
            )
            if header.position_base != (wanted := placement.position_of(header.start)):
                raise ChunkFault(name, "tokens", f"computed at position {header.position_base}, wanted at {wanted}")
            covered = self._decode(kv, buffer, header, Span(segment.span.start, stop), placement, needed)
            return _Read(header, held is not None, covered)
        except ChunkFault as fault:
            if fault.reason in _ALTERED:
                self._blobs.quarantine(name, fault.reason)
                self._host.discard(name)
            return fault

    def _decode(
        self,
        kv: SequenceKV,
        buffer: Buffer,
        header: ChunkHeader,
        within: Span,
        placement: Placement,
        needed: Sequence[tuple[Span, ...]],
    ) -> list[tuple[int, Span]]:
        covered: list[tuple[int, Span]] = []
        for index, part in enumerate(header.parts):
            wanted = [part.span.intersect(within).intersect(span) for span in needed[part.group]]
            runs = list(placement.runs(span for span in wanted if len(span)))
            targets = [(run, kv.target(part.group, run)) for run in runs]
            if not targets:
                continue
            direct = len(runs) == 1 and runs[0] == part.span and not targets[0][1].keys[0].is_cuda
            out = targets[0][1] if direct else pinned_like(targets[0][1], len(part.span))
            position = header.position_base + part.start - header.start
            decode_part(buffer, header, index, out.of(self._geometry, part.group, position), self._codecs)
            if not direct:
                _copy(out, part.span, targets)
            for run in runs:
                kv.filled(part.group, run)
            covered.extend((part.group, run) for run in runs)
        return covered

    def _hole(self, reads: Sequence[_Read], needed: Sequence[Sequence[Span]]) -> tuple[ChunkFault, int] | None:
        """Whether some group lacks keys that the state needs, and up to where a state may have all: a window that is
        not here says nothing about those before it."""
        holes: list[tuple[int, ChunkFault]] = []
        for group, spans in enumerate(needed):
            covered = sorted(span for read in reads for other, span in read.covered if other == group)
            for span in spans:
                at = span.start
                for have in covered:
                    if have.start <= at < have.stop:
                        at = have.stop
                if at < span.stop:
                    name = self._geometry.groups[group].name
                    fault = ChunkFault("-", "missing", f"{name} has no keys at {at}, needed up to {span.stop}")
                    holes.append((at if self._windows[group] is None else span.stop, fault))
                    break
        if not holes:
            return None
        usable, fault = min(holes, key=lambda hole: hole[0])
        return fault, usable


@dataclass(frozen=True, slots=True)
class _Read:
    header: ChunkHeader
    from_memory: bool
    covered: list[tuple[int, Span]]


def _copy(block: KVBlock, whole: Span, targets: Sequence[tuple[Span, KVBlock]]) -> None:
    """The wanted tokens of a part that was decoded to the side: it is not wanted whole, or on another device."""
    for span, target in targets:
        wanted = block.cut(span.start - whole.start, span.stop - whole.start)
        if target.keys[0].is_cuda:
            to_device(wanted, target)
        else:
            copied(wanted, target)


def _chain_starts(ledger: array[int], segments: Sequence[SegmentRecord]) -> list[str]:
    chain = LedgerChain()
    return [chain.extend(ledger[chain.tokens : segment.span.start]).digest() for segment in segments]
