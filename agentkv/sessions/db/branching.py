"""Forking and rewinding: a ledger up to one of its items, as another session's or as the session's own.

Plain functions of a SQLAlchemy session, each the body of one transaction or a part of it. No KV is copied: a fork
refers to the same chunks, the last of which it may use in part.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from sqlalchemy import String, delete, func, insert, literal, select, update
from sqlalchemy.orm import Session

from agentkv.sessions.db.ledger import insert_session, session_row
from agentkv.sessions.db.manifest import truncate_manifest
from agentkv.sessions.db.records import Cut, LedgerConflict, SessionRecord, pack_placement
from agentkv.sessions.db.schema import (
    ChunkRow,
    ItemRow,
    LedgerRow,
    ResumePointRow,
    SegmentRow,
    SessionRow,
    TurnRow,
)

__all__ = ["fork_session", "rewind_session"]


def fork_session(db: Session, source_id: str, tenant: str, record: SessionRecord, cut: Cut) -> None:
    """``record``: the new session's, whose ledger, items, turns and stored KV are the source's up to ``cut``.

    Items get ids of their own. ``LedgerConflict`` where the source is not as long as the cut says.
    """
    _locked(db, source_id, tenant, cut)
    insert_session(db, record)
    _copy(db, LedgerRow, source_id, record.id, LedgerRow.start < cut.position)
    _copy(db, TurnRow, source_id, record.id, TurnRow.seq < cut.turns)
    _copy(db, SegmentRow, source_id, record.id, SegmentRow.start < cut.kv_length)
    _copy(db, ResumePointRow, source_id, record.id, ResumePointRow.position <= cut.kv_length)
    items = [_values(item) for item in _rows(db, ItemRow, source_id, ItemRow.seq < cut.items)]
    if items:
        fresh = ({"session_id": record.id, "id": f"item_{secrets.token_hex(12)}"} for _ in items)
        db.execute(insert(ItemRow), [item | new for item, new in zip(items, fresh, strict=True)])
    if cut.position < cut.length:
        _shorten(db, record.id, cut)
    mine = select(SegmentRow.chunk_id).where(SegmentRow.session_id == record.id)
    uses = select(func.count()).where(SegmentRow.session_id == record.id, SegmentRow.chunk_id == ChunkRow.id)
    # The source refers to them: nobody is deleting one.
    more = update(ChunkRow).where(ChunkRow.id.in_(mine)).values(refs=ChunkRow.refs + uses.scalar_subquery())
    db.execute(more, execution_options={"synchronize_session": False})


def rewind_session(db: Session, session_id: str, tenant: str | None, cut: Cut) -> list[str]:
    """The session ends at ``cut`` from now on. Returns the chunks that lost their last reference.

    ``LedgerConflict`` where its ledger is not as long as the cut says.
    """
    row = _locked(db, session_id, tenant, cut)
    for table, beyond in (
        (ItemRow, ItemRow.seq >= cut.items),
        (TurnRow, TurnRow.seq >= cut.turns),
        (LedgerRow, LedgerRow.start >= cut.position),
    ):
        db.execute(delete(table).where(table.session_id == session_id, beyond))
    _shorten(db, session_id, cut)
    row.ledger_length, row.kv_length, row.turns = cut.position, cut.kv_length, cut.turns
    row.placement = pack_placement(cut.placement)
    row.policy_since = min(row.policy_since, cut.kv_length)
    row.updated_at = max(row.updated_at, time.time())
    db.flush()
    return truncate_manifest(db, session_id, cut.kv_length)


def _locked(db: Session, session_id: str, tenant: str | None, cut: Cut) -> SessionRow:
    row = session_row(db, session_id, tenant=tenant, lock=True)
    if row.ledger_length != cut.length:
        raise LedgerConflict(
            f"session {session_id} holds {row.ledger_length} tokens where {cut.length} were expected: another writer "
            "was faster. Reload the session and try again"
        )
    return row


def _rows(db: Session, table: Any, session_id: str, where: Any) -> list[Any]:
    return list(db.scalars(select(table).where(table.session_id == session_id, where)))


def _values(row: Any) -> dict[str, Any]:
    return {column.key: getattr(row, column.key) for column in row.__mapper__.column_attrs}


def _copy(db: Session, table: Any, source_id: str, new_id: str, where: Any) -> None:
    """Those rows of the source, as the new session's."""
    columns = [column for column in table.__table__.columns if column.key != "session_id"]
    found = select(literal(new_id, String(64)), *columns).where(table.session_id == source_id, where)
    db.execute(insert(table).from_select(["session_id", *(column.key for column in columns)], found))


def _shorten(db: Session, session_id: str, cut: Cut) -> None:
    """What reaches beyond the cut ends there: of a turn the answer goes, of a chunk the rest is not used."""
    answer = {"kind": "append", "finish_reason": None, "completion_tokens": 0, "seed": None}
    turn = update(TurnRow).where(TurnRow.session_id == session_id, TurnRow.stop > cut.position)
    db.execute(turn.values(stop=cut.position, **answer))
    segment = update(SegmentRow).where(SegmentRow.session_id == session_id, SegmentRow.stop > cut.kv_length)
    db.execute(segment.values(stop=cut.kv_length))
    for piece in _rows(db, LedgerRow, session_id, LedgerRow.stop > cut.position):
        piece.ids, piece.stop = piece.ids[: 4 * (cut.position - piece.start)], cut.position
