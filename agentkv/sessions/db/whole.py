"""A whole session, read or written at once: to move it to another home. Bodies of transactions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import insert
from sqlalchemy.orm import Session

from agentkv.sessions.db import ledger, manifest
from agentkv.sessions.db.records import ChunkRecord, ItemRecord, Manifest, SessionRecord, TurnRecord
from agentkv.sessions.db.schema import ItemRow, LedgerRow, TurnRow

__all__ = ["WholeSession", "insert_whole", "read_whole"]


@dataclass(frozen=True, slots=True)
class WholeSession:
    """One session's record and all that belongs to it, as of one moment."""

    record: SessionRecord
    ledger: array[int]
    items: list[ItemRecord]
    turns: list[TurnRecord]
    manifest: Manifest


def read_whole(db: Session, session_id: str, tenant: str) -> WholeSession:
    """``SessionNotFound`` for one that is missing or another tenant's."""
    return WholeSession(
        ledger.get_session(db, session_id, tenant),
        ledger.ledger_span(db, session_id, None),
        ledger.items(db, session_id),
        ledger.turns(db, session_id),
        manifest.manifest(db, session_id),
    )


def insert_whole(db: Session, whole: WholeSession, chunks: Sequence[ChunkRecord]) -> None:
    """A new session with everything; ``chunks``: rows of the manifest's, whose files are there.

    ``InvalidRequest`` where its id is taken, ``ManifestConflict`` where the manifest does not hold together.
    """
    record = whole.record
    ledger.insert_session(db, record)
    rows = [
        (LedgerRow, [_ledger_values(whole.ledger, turn) for turn in whole.turns if len(turn.span)]),
        (ItemRow, [ledger.item_values(record.id, item) for item in whole.items]),
        (TurnRow, [ledger.turn_values(turn) for turn in whole.turns]),
    ]
    for table, values in rows:
        if values:
            db.execute(insert(table), [each | {"session_id": record.id} for each in values])
    manifest.append_segments(db, record.id, chunks, whole.manifest.segments, whole.manifest.resume_points)


def _ledger_values(ids: array[int], turn: TurnRecord) -> dict[str, object]:
    start, stop = turn.span
    return {"start": start, "stop": stop, "ids": ledger.pack_ids(ids[start:stop])}
