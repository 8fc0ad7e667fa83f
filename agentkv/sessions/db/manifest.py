"""Manifests: which chunks a session's stored KV consists of. Plain functions, each the body of one transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from agentkv.sessions.db.chunks import batches, drop_dangling, locked_chunks, new_chunk, recount_some, release
from agentkv.sessions.db.ledger import session_row
from agentkv.sessions.db.records import (
    ChunkCondemned,
    ChunkRecord,
    Manifest,
    ManifestConflict,
    ResumePoint,
    SegmentRecord,
    pack_placement,
    unpack_placement,
)
from agentkv.sessions.db.schema import ChunkRow, ResumePointRow, SegmentRow, SessionRow, TombstoneRow
from agentkv.types import Span, without

__all__ = [
    "adopt",
    "append_segments",
    "attach",
    "delete_session",
    "manifest",
    "pointless_sessions",
    "prune_manifest",
    "release_foreign",
    "reseal",
    "truncate_manifest",
]


def append_segments(
    db: Session,
    session_id: str,
    chunks: Sequence[ChunkRecord],
    segments: Sequence[SegmentRecord],
    resume_points: Sequence[ResumePoint],
) -> None:
    """Continue the manifest where it ends, or behind a gap of what was evicted. Unknown chunks get rows.

    References are counted.
    """
    session = session_row(db, session_id, lock=True)
    _append(db, session, chunks, segments, resume_points)


def reseal(
    db: Session,
    session_id: str,
    chunks: Sequence[ChunkRecord],
    segments: Sequence[SegmentRecord],
    resume_points: Sequence[ResumePoint],
    void: Span | None,
) -> list[str]:
    """As ``append_segments``, where some of ``segments`` take the place of what is stored already: within the manifest,
    in ledger order, covering what they replace or cutting it in two.

    Resume points inside ``void`` that are not among ``resume_points`` go: what they needed is not stored any more.
    Returns the chunks that lost their last reference.
    """
    session = session_row(db, session_id, lock=True)
    end = _manifest_end(db, session_id)
    inside = [segment for segment in segments if segment.span.start < end]
    dropped: Counter[str] = Counter()
    if inside:
        mine = SegmentRow.session_id == session_id
        columns = (SegmentRow.start, SegmentRow.stop, SegmentRow.chunk_id)
        for start, stop, chunk_id in db.execute(select(*columns).where(mine).order_by(SegmentRow.start)).all():
            holes = [segment.span for segment in inside if len(segment.span.intersect(Span(start, stop)))]
            if not holes:
                continue
            db.execute(delete(SegmentRow).where(mine, SegmentRow.start == start))
            left = list(without(Span(start, stop), holes))
            for span in left:
                db.add(SegmentRow(session_id=session_id, start=span.start, stop=span.stop, chunk_id=chunk_id))
            dropped[chunk_id] += 1 - len(left)
        db.flush()
    if void is not None:
        points = [point.position for point in resume_points]
        db.execute(
            delete(ResumePointRow).where(
                ResumePointRow.session_id == session_id,
                ResumePointRow.position > void.start,
                ResumePointRow.position < void.stop,
                ResumePointRow.position.not_in(points),
            )
        )
    _append(db, session, chunks, segments, resume_points, replacing=len(inside))
    return release(db, {chunk_id: count for chunk_id, count in dropped.items() if count})


def attach(
    db: Session, session_id: str, segments: Sequence[SegmentRecord], resume_points: Sequence[ResumePoint]
) -> int:
    """Give a session that has no KV yet that of others: chunks that are stored, from the ledger's start on.

    Returns its new ``kv_length``. ``ManifestConflict`` where it has KV, ``ChunkCondemned`` where a chunk is going.
    """
    session = session_row(db, session_id, lock=True)
    if session.kv_length or _manifest_end(db, session_id):
        raise ManifestConflict(f"session {session_id} has KV of its own")
    _append(db, session, [], segments, resume_points)
    session.kv_length = segments[-1].span.stop
    session.state = "disk"
    return session.kv_length


def release_foreign(db: Session, kv_fingerprint: str, tenant: str | None) -> list[str]:
    """Sessions whose stored KV is another model's give it up, the least recently used first, until a chunk is free.

    Those of one tenant, or of all.
    Returns the chunks that lost their last reference: none where nothing foreign is stored.
    """
    foreign = (
        select(SegmentRow.session_id)
        .join(ChunkRow, ChunkRow.id == SegmentRow.chunk_id)
        .join(SessionRow, SessionRow.id == SegmentRow.session_id)
        .where(ChunkRow.kv_fingerprint != kv_fingerprint)
        .group_by(SegmentRow.session_id)
        .order_by(func.max(SessionRow.updated_at), SegmentRow.session_id)
    )
    if tenant is not None:
        foreign = foreign.where(SessionRow.tenant == tenant)
    for session_id in list(db.scalars(foreign)):
        # What several sessions share is free only when the last of them has given it up.
        if condemned := truncate_manifest(db, session_id, 0):
            return condemned
    return []


def adopt(
    db: Session,
    session_id: str,
    chunks: Sequence[ChunkRecord],
    segments: Sequence[SegmentRecord],
    resume_points: Sequence[ResumePoint],
) -> None:
    """Stored KV that was found again: ``segments`` fill holes of the manifest, or continue it, in ledger order.

    Segments whose chunk has no row go first. References are counted anew.
    """
    session = session_row(db, session_id, lock=True)
    drop_dangling(db)
    _append(db, session, chunks, segments, resume_points, replacing=len(segments))
    recount_some(db, sorted({segment.chunk_id for segment in segments}))


def pointless_sessions(db: Session) -> set[str]:
    """Sessions with stored KV whose last commit is no resume point of it."""
    stored = select(SegmentRow.session_id).where(SegmentRow.session_id == SessionRow.id)
    point = select(ResumePointRow.session_id).where(
        ResumePointRow.session_id == SessionRow.id, ResumePointRow.position == SessionRow.kv_length
    )
    return set(db.scalars(select(SessionRow.id).where(SessionRow.kv_length > 0, stored.exists(), ~point.exists())))


def _append(
    db: Session,
    session: SessionRow,
    chunks: Sequence[ChunkRecord],
    segments: Sequence[SegmentRecord],
    resume_points: Sequence[ResumePoint],
    replacing: int = 0,
) -> None:
    """``replacing``: so many of the first segments fill holes that were made for them."""
    session_id = session.id
    end = _manifest_end(db, session_id)
    evicts = session.placement is not None
    for segment in segments[:replacing]:
        end = max(end, segment.span.stop)
    for segment in segments[replacing:]:
        gap = segment.span.start - end
        if gap < 0 or (gap and not evicts) or len(segment.span) == 0:
            raise ManifestConflict(
                f"segment [{segment.span.start}, {segment.span.stop}) does not continue the manifest of {session_id}, "
                f"which ends at {end}"
            )
        end = segment.span.stop
    if end > session.ledger_length:
        raise ManifestConflict(f"segments reach {end}, the ledger of {session_id} has {session.ledger_length} tokens")
    for point in resume_points:
        # Behind the last segment lies at most what was evicted as soon as it was computed.
        limit = end if point.placement is None else session.ledger_length
        if not 0 <= point.position <= limit:
            raise ManifestConflict(
                f"resume point {point.position} lies outside the stored [0, {limit}) of {session_id}"
            )

    offered = {chunk.id: chunk for chunk in chunks}
    uses = Counter(segment.chunk_id for segment in segments)
    rows = locked_chunks(db, sorted(offered.keys() | uses.keys()))
    for row in rows.values():
        if row.deleting:
            raise ChunkCondemned(row.id)
    for new_id in sorted(offered.keys() - rows.keys()):
        rows[new_id] = new_chunk(offered[new_id])
        db.add(rows[new_id])
    for segment in segments:
        _check_within(segment, rows.get(segment.chunk_id), session)
    for chunk_id, count in uses.items():
        rows[chunk_id].refs += count
    db.flush()
    for batch in batches(sorted(offered)):
        # Written again after it was deleted: it is wanted now.
        db.execute(delete(TombstoneRow).where(TombstoneRow.chunk_id.in_(batch)))

    if segments:
        db.execute(
            insert(SegmentRow),
            [
                {"session_id": session_id, "start": s.span.start, "stop": s.span.stop, "chunk_id": s.chunk_id}
                for s in segments
            ],
        )
    known = set(_resume_points(db, session_id))
    fresh = sorted(set(resume_points) - known)
    if fresh:
        db.execute(
            insert(ResumePointRow),
            [
                {
                    "session_id": session_id,
                    "position": p.position,
                    "kind": p.kind,
                    "placement": pack_placement(p.placement),
                }
                for p in fresh
            ],
        )


def manifest(db: Session, session_id: str) -> Manifest:
    """The stored KV of a session, in ledger order."""
    session_row(db, session_id)
    rows = db.execute(
        select(SegmentRow.chunk_id, SegmentRow.start, SegmentRow.stop, ChunkRow.codec)
        .join(ChunkRow, ChunkRow.id == SegmentRow.chunk_id)
        .where(SegmentRow.session_id == session_id)
        .order_by(SegmentRow.start)
    )
    segments = tuple(SegmentRecord(chunk_id, Span(start, stop), codec) for chunk_id, start, stop, codec in rows)
    return Manifest(segments, tuple(_resume_points(db, session_id)))


def truncate_manifest(db: Session, session_id: str, position: int) -> list[str]:
    """Nothing stored at or after ``position`` remains. Returns the chunks that lost their last reference."""
    session_row(db, session_id, lock=True)
    mine = SegmentRow.session_id == session_id
    dropped = Counter(db.scalars(select(SegmentRow.chunk_id).where(mine, SegmentRow.start >= position)))
    db.execute(delete(SegmentRow).where(mine, SegmentRow.start >= position))
    db.execute(update(SegmentRow).where(mine, SegmentRow.stop > position).values(stop=position))
    db.execute(
        delete(ResumePointRow).where(ResumePointRow.session_id == session_id, ResumePointRow.position > position)
    )
    return release(db, dropped)


def prune_manifest(db: Session, session_id: str, needed: Sequence[Span], point: int) -> list[str]:
    """Segments that share nothing with ``needed`` go, and with them older resume points that needed them.

    Returns the chunks that lost their last reference.
    """
    session_row(db, session_id, lock=True)
    mine = SegmentRow.session_id == session_id
    rows = db.execute(select(SegmentRow.start, SegmentRow.stop, SegmentRow.chunk_id).where(mine)).all()
    gone = [row for row in rows if not any(len(Span(row.start, row.stop).intersect(span)) for span in needed)]
    if not gone:
        return []
    for batch in batches([str(row.start) for row in gone]):
        db.execute(delete(SegmentRow).where(mine, SegmentRow.start.in_([int(start) for start in batch])))
    left = [Span(row.start, row.stop) for row in rows if row not in gone]
    for old in _resume_points(db, session_id):
        held = sum(len(span.intersect(kept)) for span in left for kept in old.held.kept)
        if old.position < point and held < old.held.tokens:
            db.execute(
                delete(ResumePointRow).where(
                    ResumePointRow.session_id == session_id, ResumePointRow.position == old.position
                )
            )
    return release(db, Counter(row.chunk_id for row in gone))


def delete_session(db: Session, session_id: str, tenant: str) -> list[str]:
    """The session with everything of it. Returns the chunks that lost their last reference."""
    session_row(db, session_id, tenant=tenant, lock=True)
    dropped = Counter(db.scalars(select(SegmentRow.chunk_id).where(SegmentRow.session_id == session_id)))
    db.execute(delete(SessionRow).where(SessionRow.id == session_id))
    return release(db, dropped)


def _manifest_end(db: Session, session_id: str) -> int:
    return db.scalar(select(func.max(SegmentRow.stop)).where(SegmentRow.session_id == session_id)) or 0


def _resume_points(db: Session, session_id: str) -> list[ResumePoint]:
    rows = db.execute(
        select(ResumePointRow.position, ResumePointRow.kind, ResumePointRow.placement)
        .where(ResumePointRow.session_id == session_id)
        .order_by(ResumePointRow.position, ResumePointRow.kind)
    )
    return [ResumePoint(position, kind, unpack_placement(packed)) for position, kind, packed in rows]


def _check_within(segment: SegmentRecord, chunk: ChunkRow | None, session: SessionRow) -> None:
    if chunk is None or chunk.tenant != session.tenant:
        raise ManifestConflict(f"segment of {session.id} names chunk {segment.chunk_id}, which is not known here")
    if not chunk.start <= segment.span.start < segment.span.stop <= chunk.stop:
        raise ManifestConflict(
            f"segment [{segment.span.start}, {segment.span.stop}) of {session.id} is not within chunk {chunk.id}, "
            f"which holds [{chunk.start}, {chunk.stop})"
        )
