"""Forking and rewinding: a ledger up to one of its items, as another session's or as the session's own.

Plain functions of a SQLAlchemy session, each the body of one transaction or a part of it. No KV is copied: a fork
refers to the same chunks, the last of which it may use in part.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from agentkv.sessions.db.ledger import insert_session, session_row
from agentkv.sessions.db.manifest import inherit, points_of, truncate_manifest
from agentkv.sessions.db.records import Cut, LedgerConflict, SegmentRecord, SessionRecord, pack_placement
from agentkv.sessions.db.schema import ItemRow, LedgerRow, SegmentRow, SessionRow, TurnRow
from agentkv.types import Span

__all__ = ["fork_session", "rewind_session"]


def fork_session(db: Session, source_id: str, tenant: str, record: SessionRecord, cut: Cut) -> None:
    """``record``: the new session's, whose ledger, items, turns and stored KV are the source's up to ``cut``.

    Items get ids of their own. ``LedgerConflict`` where the source is not as long as the cut says.
    """
    _locked(db, source_id, tenant, cut)
    row = insert_session(db, record)
    ledger = [
        _values(piece) | {"stop": min(piece.stop, cut.position), "ids": piece.ids[: 4 * (cut.position - piece.start)]}
        for piece in _rows(db, LedgerRow, source_id, LedgerRow.start < cut.position)
    ]
    items = [
        _values(item) | {"id": f"item_{secrets.token_hex(12)}"}
        for item in _rows(db, ItemRow, source_id, ItemRow.seq < cut.items)
    ]
    turns = [
        _values(turn) | _shortened(turn, cut.position)
        for turn in _rows(db, TurnRow, source_id, TurnRow.seq < cut.turns)
    ]
    for table, values in ((LedgerRow, ledger), (ItemRow, items), (TurnRow, turns)):
        if values:
            db.execute(insert(table), [each | {"session_id": record.id} for each in values])
    stored = db.execute(
        select(SegmentRow.chunk_id, SegmentRow.start, SegmentRow.stop)
        .where(SegmentRow.session_id == source_id, SegmentRow.start < cut.kv_length)
        .order_by(SegmentRow.start)
    )
    segments = [SegmentRecord(name, Span(start, min(stop, cut.kv_length))) for name, start, stop in stored]
    inherit(db, row, segments, [point for point in points_of(db, source_id) if point.position <= cut.kv_length])


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
    for turn in _rows(db, TurnRow, session_id, TurnRow.stop > cut.position):
        for name, value in _shortened(turn, cut.position).items():
            setattr(turn, name, value)
    for piece in _rows(db, LedgerRow, session_id, LedgerRow.stop > cut.position):
        piece.ids, piece.stop = piece.ids[: 4 * (cut.position - piece.start)], cut.position
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


def _shortened(turn: TurnRow, position: int) -> dict[str, Any]:
    """What changes of a turn that is cut at ``position``: nothing where it ends before. Its answer is what goes."""
    if turn.stop <= position:
        return {}
    return {"stop": position, "kind": "append", "finish_reason": None, "completion_tokens": 0, "seed": None}
