"""Responses: plain functions of a SQLAlchemy session, each the body of one transaction."""

from __future__ import annotations

from sqlalchemy.orm import Session

from agentkv.errors import ResponseNotFound
from agentkv.sessions.db.records import ResponseRecord
from agentkv.sessions.db.schema import ResponseRow, SessionRow

__all__ = ["add_response", "delete_response", "get_response"]


def add_response(db: Session, record: ResponseRecord) -> bool:
    """``False`` where its session is not there any more: then it is not kept."""
    if record.session_id is not None and db.get(SessionRow, record.session_id, with_for_update=True) is None:
        return False
    db.add(ResponseRow(**{name: getattr(record, name) for name in ResponseRecord.__dataclass_fields__}))
    return True


def get_response(db: Session, response_id: str, tenant: str) -> ResponseRecord:
    """``ResponseNotFound`` for one that is missing or another tenant's."""
    row = _row(db, response_id, tenant)
    return ResponseRecord(**{name: getattr(row, name) for name in ResponseRecord.__dataclass_fields__})


def delete_response(db: Session, response_id: str, tenant: str) -> None:
    """Its session stays. ``ResponseNotFound`` for one that is missing or another tenant's."""
    db.delete(_row(db, response_id, tenant))


def _row(db: Session, response_id: str, tenant: str) -> ResponseRow:
    row = db.get(ResponseRow, response_id)
    if row is None or row.tenant != tenant:
        raise ResponseNotFound(response_id)
    return row
