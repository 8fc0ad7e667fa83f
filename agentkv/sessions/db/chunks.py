"""The index of chunks: their rows, references, and what becomes of those that nobody needs. Bodies of transactions.

The life of a chunk row::

    append_segments          last reference dropped        claim_garbage        forget_chunks
    ──────────────▶  refs>0  ─────────────────────▶ refs=0 ─────────────▶ deleting ───────────▶ tombstone
                       ▲       append_segments        │       append_segments │      append_segments │
                       └──────────────────────────────┘       ChunkCondemned ─┘      (a new row) ◀───┘

The caller deletes the file between ``claim_garbage`` and ``forget_chunks``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sqlalchemy import ScalarSelect, delete, func, insert, or_, select, update
from sqlalchemy.orm import Session

from agentkv.sessions.db.records import ChunkFacts, ChunkRecord, ManifestConflict
from agentkv.sessions.db.schema import ChunkRow, SegmentRow, TombstoneRow
from agentkv.types import Span

__all__ = [
    "batches",
    "chunk_bytes",
    "chunk_facts",
    "claim_garbage",
    "drop_dangling",
    "forget_chunks",
    "known_chunk_ids",
    "locked_chunks",
    "loose_chunks",
    "new_chunk",
    "recount",
    "recount_some",
    "release",
    "stored_chunks",
    "tenant_bytes",
    "tombstoned",
]

_BATCH = 500


def stored_chunks(db: Session, tenant: str, keys: Sequence[str]) -> list[ChunkRecord]:
    """Chunks of one tenant that are stored under any of these lookup keys and are not being deleted."""
    found: list[ChunkRecord] = []
    for batch in batches(sorted(set(keys))):
        query = select(ChunkRow).where(
            ChunkRow.lookup_key.in_(batch), ChunkRow.tenant == tenant, ChunkRow.refs > 0, ~ChunkRow.deleting
        )
        found.extend(_record(row) for row in db.scalars(query.order_by(ChunkRow.id)))
    return found


def loose_chunks(db: Session) -> list[str]:
    """Chunks that no segment names, or that fewer or more name than ``refs`` counts: rows of a manifest were lost."""
    query = select(ChunkRow.id).where(~ChunkRow.deleting, or_(ChunkRow.refs == 0, ChunkRow.refs != _uses()))
    return list(db.scalars(query.order_by(ChunkRow.id)))


def recount(db: Session) -> None:
    """Every chunk's references as the segments say; segments whose chunk has no row go."""
    drop_dangling(db)
    recount_some(db, None)


def drop_dangling(db: Session) -> None:
    """Segments whose chunk has no row go."""
    db.execute(delete(SegmentRow).where(SegmentRow.chunk_id.not_in(select(ChunkRow.id))))


def recount_some(db: Session, ids: Sequence[str] | None) -> None:
    """References of these chunks, of all where ``None``, as the segments say."""
    wrong = update(ChunkRow).where(~ChunkRow.deleting, ChunkRow.refs != _uses()).values(refs=_uses())
    db.flush()
    for batch in [None] if ids is None else batches(ids):
        statement = wrong if batch is None else wrong.where(ChunkRow.id.in_(batch))
        db.execute(statement, execution_options={"synchronize_session": False})
    db.expire_all()


def _uses() -> ScalarSelect[int]:
    """How many segments name a chunk."""
    return select(func.count()).where(SegmentRow.chunk_id == ChunkRow.id).correlate(ChunkRow).scalar_subquery()


def claim_garbage(db: Session, limit: int, spared: frozenset[str]) -> list[str]:
    """Up to ``limit`` chunks that the caller may delete now: fresh ones, none of ``spared``, then those claimed and
    never forgotten."""
    unused = select(ChunkRow).where(ChunkRow.refs == 0).order_by(ChunkRow.id).with_for_update()
    found = db.scalars(unused.where(~ChunkRow.deleting).limit(limit + len(spared)))
    fresh = [row for row in found if row.id not in spared][:limit]
    left_over = list(db.scalars(unused.where(ChunkRow.deleting).limit(limit - len(fresh))))
    for row in fresh:
        row.deleting = True
    return [row.id for row in (*fresh, *left_over)]


def forget_chunks(db: Session, ids: Sequence[str], at: float) -> None:
    """Replace claimed rows, and ids without a row, by tombstones. ``ManifestConflict`` for a row not claimed."""
    unique = sorted(set(ids))
    for row in locked_chunks(db, unique).values():
        if not row.deleting or row.refs:
            raise ManifestConflict(f"chunk {row.id} was not claimed for deletion and has {row.refs} references")
    for batch in batches(unique):
        db.execute(delete(ChunkRow).where(ChunkRow.id.in_(batch)))
        db.execute(delete(TombstoneRow).where(TombstoneRow.chunk_id.in_(batch)))
        db.execute(insert(TombstoneRow), [{"chunk_id": chunk_id, "at": at} for chunk_id in batch])


def known_chunk_ids(db: Session) -> set[str]:
    """Every chunk with a row, condemned and claimed ones included."""
    return set(db.scalars(select(ChunkRow.id)))


def chunk_bytes(db: Session) -> dict[str, int]:
    """Bytes of all chunk files with a row, by KV fingerprint."""
    rows = db.execute(select(ChunkRow.kv_fingerprint, func.sum(ChunkRow.nbytes)).group_by(ChunkRow.kv_fingerprint))
    return {fingerprint: int(nbytes) for fingerprint, nbytes in rows}


def tenant_bytes(db: Session) -> dict[str, int]:
    """Bytes of the chunks that sessions need, by tenant."""
    needed = select(ChunkRow.tenant, func.sum(ChunkRow.nbytes)).where(ChunkRow.refs > 0)
    return {tenant: int(nbytes) for tenant, nbytes in db.execute(needed.group_by(ChunkRow.tenant))}


def chunk_facts(db: Session) -> list[ChunkFacts]:
    """Every chunk with a row, in the order of their ids."""
    users = func.count(SegmentRow.session_id.distinct())
    columns = (ChunkRow.id, ChunkRow.codec, ChunkRow.kv_fingerprint, ChunkRow.nbytes)
    query = select(*columns, users).outerjoin(SegmentRow, SegmentRow.chunk_id == ChunkRow.id).group_by(*columns)
    return [ChunkFacts(*row) for row in db.execute(query.order_by(ChunkRow.id))]


def tombstoned(db: Session, ids: Sequence[str]) -> set[str]:
    """Those of ``ids`` that were deleted on purpose."""
    found: set[str] = set()
    for batch in batches(sorted(set(ids))):
        found.update(db.scalars(select(TombstoneRow.chunk_id).where(TombstoneRow.chunk_id.in_(batch))))
    return found


def locked_chunks(db: Session, ids: Sequence[str]) -> dict[str, ChunkRow]:
    # In the order of their ids, always, so that two transactions cannot wait for each other.
    rows: dict[str, ChunkRow] = {}
    for batch in batches(ids):
        query = select(ChunkRow).where(ChunkRow.id.in_(batch)).order_by(ChunkRow.id).with_for_update()
        rows.update((row.id, row) for row in db.scalars(query))
    return rows


def release(db: Session, dropped: Mapping[str, int]) -> list[str]:
    condemned: list[str] = []
    for row in locked_chunks(db, sorted(dropped)).values():
        row.refs -= dropped[row.id]
        if row.refs == 0:
            condemned.append(row.id)
    return condemned


def _record(row: ChunkRow) -> ChunkRecord:
    return ChunkRecord(
        row.id, row.lookup_key, row.tenant, row.kv_fingerprint, Span(row.start, row.stop), row.codec, row.nbytes
    )


def new_chunk(chunk: ChunkRecord) -> ChunkRow:
    return ChunkRow(
        id=chunk.id,
        lookup_key=chunk.lookup_key,
        tenant=chunk.tenant,
        kv_fingerprint=chunk.kv_fingerprint,
        start=chunk.span.start,
        stop=chunk.span.stop,
        codec=chunk.codec,
        nbytes=chunk.nbytes,
        refs=0,
        deleting=False,
    )


def batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    # SQLite and PostgreSQL limit the parameters of one statement.
    for start in range(0, len(ids), _BATCH):
        yield ids[start : start + _BATCH]
