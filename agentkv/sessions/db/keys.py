"""Keys and what their tenants may use: plain functions of a SQLAlchemy session, each the body of one transaction.

A key is a tenant: its id is whom sessions and chunks belong to. Of the secret only a digest is kept; 32 random bytes
cannot be guessed, so that the digest needs neither salt nor slowness.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from agentkv.errors import InvalidRequest, KeyNotFound, LimitExceeded
from agentkv.sessions.db.records import DiskUse, KeyRecord
from agentkv.sessions.db.schema import ChunkRow, KeyRow, SessionRow

__all__ = ["check_sessions", "create_key", "disk_use", "find_key", "key_used", "keys", "new_key", "revoke_key"]

_PREFIX = "akv_"
_LONGEST_NAME = 128
_MOST = 2**63 - 1


def new_key(
    name: str,
    *,
    admin: bool,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    max_sessions: int | None,
    max_disk: int | None,
) -> tuple[KeyRecord, str]:
    """A key that is not stored yet, and its secret. ``InvalidRequest`` for a name or a limit that cannot be."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise InvalidRequest(
            f"a key's name is a text of 1 to {_LONGEST_NAME} printable characters, got {name!r}", param="name"
        )
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_sessions": max_sessions,
        "max_disk": max_disk,
    }
    for limit, value in limits.items():
        if value is not None and not 0 <= value <= _MOST:
            raise InvalidRequest(f"{limit} must lie in [0, {_MOST}], got {value}", param=limit)
    record = KeyRecord(f"key_{secrets.token_hex(16)}", name, admin, created_at=time.time(), **limits)
    return record, _PREFIX + secrets.token_urlsafe(32)


def create_key(db: Session, record: KeyRecord, secret: str) -> None:
    """``InvalidRequest`` where a key that is not revoked has that name."""
    if db.scalar(select(KeyRow.id).where(KeyRow.name == record.name, KeyRow.revoked_at.is_(None)).limit(1)):
        raise InvalidRequest(f"there is a key {record.name!r} already: revoke it, or choose another name", param="name")
    db.add(
        KeyRow(
            id=record.id,
            name=record.name,
            digest=_digest(secret),
            admin=record.admin,
            requests_per_minute=record.requests_per_minute,
            tokens_per_minute=record.tokens_per_minute,
            max_sessions=record.max_sessions,
            max_disk=record.max_disk,
            created_at=record.created_at,
        )
    )


def keys(db: Session) -> list[KeyRecord]:
    """All of them, revoked ones included, oldest first."""
    return [_record(row) for row in db.scalars(select(KeyRow).order_by(KeyRow.created_at, KeyRow.id))]


def find_key(db: Session, secret: str) -> KeyRecord | None:
    """The key with that secret, unless it is revoked."""
    # Looked up by its digest: how long that takes tells nothing about the secret.
    row = db.scalar(select(KeyRow).where(KeyRow.digest == _digest(secret), KeyRow.revoked_at.is_(None)))
    return None if row is None else _record(row)


def revoke_key(db: Session, name: str) -> KeyRecord:
    """The key with that id or name is good for nothing from now on; one that is revoked stays as it is."""
    row = _row(db, name)
    if row.revoked_at is None:
        row.revoked_at = time.time()
    return _record(row)


def key_used(db: Session, key_id: str, at: float) -> None:
    """It was used at unix second ``at``; an earlier use than the last one changes nothing."""
    row = db.get(KeyRow, key_id, with_for_update=True)
    if row is not None and (row.last_used_at is None or row.last_used_at < at):
        row.last_used_at = at


def check_sessions(db: Session, tenant: str) -> None:
    """``LimitExceeded`` where the tenant has as many sessions as its key allows. Of two at once the second waits."""
    row = db.scalar(select(KeyRow).where(KeyRow.id == tenant, KeyRow.max_sessions.is_not(None)).with_for_update())
    if row is None or row.max_sessions is None:
        return
    used = db.scalar(select(func.count()).select_from(SessionRow).where(SessionRow.tenant == tenant)) or 0
    if used >= row.max_sessions:
        raise LimitExceeded(
            f"key {row.name!r} may have {row.max_sessions:,} sessions and has {used:,}: delete one first",
            limit=row.max_sessions,
            used=used,
        )


def disk_use(db: Session, tenant: str, but: Sequence[str]) -> DiskUse | None:
    """Bytes of the chunks that the tenant's sessions need, those called ``but`` left out; ``None`` without a limit."""
    found = db.execute(select(KeyRow.name, KeyRow.max_disk).where(KeyRow.id == tenant)).first()
    if found is None or found.max_disk is None:
        return None
    mine = (ChunkRow.tenant == tenant, ChunkRow.refs > 0)
    used = int(db.scalar(select(func.sum(ChunkRow.nbytes)).where(*mine)) or 0)
    # SQLite and PostgreSQL limit the parameters of one statement.
    for start in range(0, len(but), 500):
        batch = ChunkRow.id.in_(but[start : start + 500])
        used -= int(db.scalar(select(func.sum(ChunkRow.nbytes)).where(*mine, batch)) or 0)
    return DiskUse(found.name, found.max_disk, used)


def _row(db: Session, name: str) -> KeyRow:
    if (row := db.get(KeyRow, name, with_for_update=True)) is not None:
        return row
    rows = list(db.scalars(select(KeyRow).where(KeyRow.name == name).with_for_update()))
    rows = [row for row in rows if row.revoked_at is None] or rows
    if not rows:
        raise KeyNotFound(name)
    if len(rows) > 1:
        raise InvalidRequest(
            f"{len(rows)} keys are called {name!r}: name one by its id, {' or '.join(row.id for row in rows)}",
            param="key",
        )
    return rows[0]


def _record(row: KeyRow) -> KeyRecord:
    return KeyRecord(
        row.id,
        row.name,
        row.admin,
        requests_per_minute=row.requests_per_minute,
        tokens_per_minute=row.tokens_per_minute,
        max_sessions=row.max_sessions,
        max_disk=row.max_disk,
        created_at=row.created_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
    )


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
