"""Is what is stored what the model would compute? Every byte is checked, and a sample is computed again."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentkv.engine.comparing import Deviation, deviation, distances
from agentkv.engine.job import Job
from agentkv.engine.loading import LoadedModel
from agentkv.errors import ChunkFault, StorageError
from agentkv.kv.contract import SequenceKV
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.records import Manifest
from agentkv.sessions.recompute import computed
from agentkv.storage.blobs import BlobStore
from agentkv.storage.chunkfile import verify as verify_chunk

if TYPE_CHECKING:
    from agentkv.sessions.tiers import Tiers

__all__ = ["Verification", "verified"]

_SCORED = 32
"""Tokens whose distributions are compared."""


@dataclass(frozen=True, slots=True)
class Verification:
    """``chunks`` were read and their checksums compared; ``faults``: of which so many failed, by reason.

    ``tokens`` from the ledger's start on were computed again: their keys and values differ from those that the session
    has by ``deviation``, and the distributions after the next tokens by ``mean_kl`` and ``max_kl`` nats (``None`` where
    the state there cannot be had: a sliding window or a policy has gone on). In bf16 a recompute is not bit for bit
    what was computed token by token; float32 and a lossless codec come to about 1e-5. ``codecs``: what it was restored
    from, ``None`` where it was live.
    """

    session_id: str
    chunks: int
    faults: Mapping[str, int]
    tokens: int
    deviation: Deviation | None
    mean_kl: float | None
    max_kl: float | None
    codecs: str | None


async def verified(core: SessionCore, tokens: int, model: LoadedModel, tiers: Tiers) -> Verification:
    """See ``Session.verify``. Call with the gate held and device memory reserved for the session."""
    manifest = await tiers.repository.manifest(core.id)
    faults = await asyncio.to_thread(_faults, tiers.blobs, manifest)
    report = await tiers.make_live(core)
    assert core.kv is not None
    ledger = await core.load(tiers.repository)
    whole = min(core.kv.placement.whole_prefix, core.kv.length)
    sample = min(tokens, whole)
    apart, kl = None, None
    if sample:
        fresh = model.layout.open(sample + _SCORED, sample + _SCORED)
        try:
            await computed(Job(fresh, ledger[:sample], model.piece, [core.record.pinned]), model, tiers.residency.rates)
            fresh.settle()
            apart, kl = await _compared(core.kv, fresh, ledger, sample, model)
        finally:
            fresh.close()
    return Verification(
        session_id=core.id,
        chunks=len(manifest.segments),
        faults=faults,
        tokens=sample,
        deviation=apart,
        mean_kl=None if kl is None else kl[0],
        max_kl=None if kl is None else kl[1],
        codecs=report.codec,
    )


async def _compared(
    kv: SequenceKV, fresh: SequenceKV, ledger: array[int], sample: int, model: LoadedModel
) -> tuple[Deviation, tuple[float, float] | None]:
    following = ledger[sample : sample + _SCORED]
    stored = kv.fork()

    def work() -> tuple[Deviation, tuple[float, float] | None]:
        try:
            stored.crop(sample)
        except ValueError:
            return deviation(stored, fresh), None
        return deviation(stored, fresh), distances(model, stored, fresh, following) if following else None

    try:
        return await model.engine.call(work)
    finally:
        stored.close()


def _faults(blobs: BlobStore, manifest: Manifest) -> dict[str, int]:
    """Chunks that are not what was written, by reason. Blocking."""
    found: Counter[str] = Counter()
    for segment in manifest.segments:
        try:
            verify_chunk(blobs.get(segment.chunk_id), segment.chunk_id)
        except ChunkFault as fault:
            found[fault.reason] += 1
        except StorageError:
            found["unreadable"] += 1
    return dict(found)
