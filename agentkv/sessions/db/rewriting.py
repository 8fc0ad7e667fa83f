"""A session that becomes another one under its id: the body of one transaction."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, insert
from sqlalchemy.orm import Session

from agentkv.sessions.db import ledger
from agentkv.sessions.db.manifest import truncate_manifest
from agentkv.sessions.db.records import ItemRecord, LedgerConflict, SessionRecord, TurnRecord
from agentkv.sessions.db.schema import ItemRow, LedgerRow, TurnRow

__all__ = ["rewrite_session"]


def rewrite_session(
    db: Session,
    record: SessionRecord,
    items: Sequence[ItemRecord],
    ids: Sequence[int],
    turns: Sequence[TurnRecord],
    expect_length: int,
) -> list[str]:
    """The session is ``record`` from now on, without KV. Returns the chunks that lost their last reference."""
    row = ledger.session_row(db, record.id, tenant=record.tenant, lock=True)
    if row.ledger_length != expect_length:
        raise LedgerConflict(
            f"session {record.id} holds {row.ledger_length} tokens where {expect_length} were expected: another writer "
            "was faster. Try again"
        )
    for table in (ItemRow, TurnRow, LedgerRow):
        db.execute(delete(table).where(table.session_id == record.id))
    row.system, row.tools, row.template_args = record.system, record.tools, record.template_args
    row.instructions, row.pinned, row.ledger_length = record.instructions, record.pinned, record.ledger_length
    row.kv_length, row.turns, row.placement, row.policy_since = 0, record.turns, None, 0
    row.state, row.updated_at = "new", record.updated_at
    db.flush()
    dropped = truncate_manifest(db, record.id, 0)
    for turn in turns:
        packed = ledger.pack_ids(ids[turn.span.start : turn.span.stop])
        if packed:
            values = {"session_id": record.id, "start": turn.span.start, "stop": turn.span.stop, "ids": packed}
            db.execute(insert(LedgerRow).values(**values))
    if items:
        db.execute(insert(ItemRow), [ledger.item_values(record.id, item) for item in items])
    if turns:
        db.execute(insert(TurnRow), [{"session_id": record.id, **ledger.turn_values(turn)} for turn in turns])
    return dropped
