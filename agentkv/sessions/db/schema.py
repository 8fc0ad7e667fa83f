"""The tables. Portable types only; every table name is prefixed, as a shared server may hold others' tables.

A change here needs a migration under ``migrations/versions`` and a new last entry in ``REVISIONS``;
``tests/integration/test_db.py`` compares the two.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Double, ForeignKey, Index, LargeBinary, MetaData, String, Text, false
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

__all__ = [
    "REVISIONS",
    "VERSION_TABLE",
    "Base",
    "ChunkRow",
    "ItemRow",
    "KeyRow",
    "LedgerRow",
    "ResponseRow",
    "ResumePointRow",
    "SegmentRow",
    "SessionRow",
    "TombstoneRow",
    "TurnRow",
]

VERSION_TABLE = "agentkv_schema"
REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006")
"""Every revision this version of agentkv knows, oldest first."""

_JSON = JSON(none_as_null=True)
# The lengths matter to MySQL alone, which otherwise stops at 64 KiB.
_LONG_TEXT = Text().with_variant(Text(2**24), "mysql", "mariadb")
_BLOB = LargeBinary().with_variant(LargeBinary(2**24), "mysql", "mariadb")


class Base(DeclarativeBase):
    """Base of all tables; constraint names are fixed so that migrations can address them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


def _session_key() -> Mapped[str]:
    return mapped_column(String(64), ForeignKey("agentkv_sessions.id", ondelete="CASCADE"), primary_key=True)


class SessionRow(Base):
    """One session; see ``SessionRecord``."""

    __tablename__ = "agentkv_sessions"
    __table_args__ = (
        Index(None, "tenant", "created_at", "id"),
        Index(None, "tenant", "agent_id", "created_at", "id"),
        Index(None, "parent_id"),
        Index(None, "tenant", "name", unique=True),
        Index(None, "anonymous", "tenant", "updated_at"),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(128))
    agent_id: Mapped[str | None] = mapped_column(String(255))
    model: Mapped[str] = mapped_column(String(1024))
    kv_fingerprint: Mapped[str] = mapped_column(String(128))
    session_fingerprint: Mapped[str] = mapped_column(String(128))
    policy: Mapped[str] = mapped_column(Text)
    idle_codec: Mapped[str] = mapped_column(String(64))
    system: Mapped[str | None] = mapped_column(_LONG_TEXT)
    tools: Mapped[list[Any] | None] = mapped_column(_JSON)
    template_args: Mapped[dict[str, Any]] = mapped_column(_JSON)
    user_metadata: Mapped[dict[str, Any]] = mapped_column("metadata", _JSON)
    pinned: Mapped[int] = mapped_column(BigInteger)
    ledger_length: Mapped[int] = mapped_column(BigInteger)
    kv_length: Mapped[int] = mapped_column(BigInteger)
    turns: Mapped[int]
    created_at: Mapped[float] = mapped_column(Double)
    updated_at: Mapped[float] = mapped_column(Double)
    state: Mapped[str] = mapped_column(String(16))
    placement: Mapped[dict[str, Any] | None] = mapped_column(_JSON)
    policy_since: Mapped[int] = mapped_column(BigInteger, server_default="0")
    parent_id: Mapped[str | None] = mapped_column(String(64))
    forked_at: Mapped[int | None] = mapped_column(BigInteger)
    clock: Mapped[float | None] = mapped_column(Double)
    anonymous: Mapped[bool] = mapped_column(server_default=false())
    name: Mapped[str | None] = mapped_column(String(200))
    cache_key: Mapped[str | None] = mapped_column(String(200))
    instructions: Mapped[str | None] = mapped_column(_LONG_TEXT)


class LedgerRow(Base):
    """The token ids ``[start, stop)`` of a ledger, as little-endian int32."""

    __tablename__ = "agentkv_ledger"

    session_id: Mapped[str] = _session_key()
    start: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    stop: Mapped[int] = mapped_column(BigInteger)
    ids: Mapped[bytes] = mapped_column(_BLOB)


class ItemRow(Base):
    """One item; see ``ItemRecord``."""

    __tablename__ = "agentkv_items"
    __table_args__ = (Index(None, "id", unique=True), Index(None, "chain"))

    session_id: Mapped[str] = _session_key()
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    id: Mapped[str] = mapped_column(String(64))
    turn: Mapped[int]
    role: Mapped[str] = mapped_column(String(64))
    kind: Mapped[str] = mapped_column(String(16))
    content: Mapped[Any] = mapped_column(JSON)
    start: Mapped[int] = mapped_column(BigInteger)
    stop: Mapped[int] = mapped_column(BigInteger)
    generated: Mapped[bool]
    chain: Mapped[str | None] = mapped_column(String(64))


class TurnRow(Base):
    """One turn; see ``TurnRecord``."""

    __tablename__ = "agentkv_turns"

    session_id: Mapped[str] = _session_key()
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    start: Mapped[int] = mapped_column(BigInteger)
    stop: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str] = mapped_column(String(16))
    finish_reason: Mapped[str | None] = mapped_column(String(32))
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    seed: Mapped[int | None] = mapped_column(BigInteger)
    restore: Mapped[dict[str, Any] | None] = mapped_column(_JSON)
    created_at: Mapped[float] = mapped_column(Double)


class ChunkRow(Base):
    """One stored chunk. ``refs`` counts the segments that name it.

    ``deleting`` is set once, by the sweep, on a row with no references; such a row only ever goes away.
    """

    __tablename__ = "agentkv_chunks"
    __table_args__ = (Index(None, "lookup_key"), Index(None, "refs", "deleting"), Index(None, "tenant"))

    id: Mapped[str] = mapped_column(String(255), primary_key=True)
    lookup_key: Mapped[str] = mapped_column(String(255))
    tenant: Mapped[str] = mapped_column(String(128))
    kv_fingerprint: Mapped[str] = mapped_column(String(128))
    start: Mapped[int] = mapped_column(BigInteger)
    stop: Mapped[int] = mapped_column(BigInteger)
    codec: Mapped[str] = mapped_column(String(64))
    nbytes: Mapped[int] = mapped_column(BigInteger)
    refs: Mapped[int]
    deleting: Mapped[bool]


class SegmentRow(Base):
    """The part ``[start, stop)`` of a session's ledger whose KV is taken from a chunk."""

    __tablename__ = "agentkv_segments"
    __table_args__ = (Index(None, "chunk_id"),)

    session_id: Mapped[str] = _session_key()
    start: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    stop: Mapped[int] = mapped_column(BigInteger)
    chunk_id: Mapped[str] = mapped_column(String(255), ForeignKey("agentkv_chunks.id"))


class ResumePointRow(Base):
    """A resume point; see ``ResumePoint``."""

    __tablename__ = "agentkv_resume_points"

    session_id: Mapped[str] = _session_key()
    position: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    placement: Mapped[dict[str, Any] | None] = mapped_column(_JSON)


class ResponseRow(Base):
    """One response; see ``ResponseRecord``. It goes with its session."""

    __tablename__ = "agentkv_responses"
    __table_args__ = (Index(None, "session_id"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(128))
    session_id: Mapped[str | None] = mapped_column(
        String(64), ForeignKey("agentkv_sessions.id", ondelete="CASCADE"), nullable=True
    )
    item_id: Mapped[str | None] = mapped_column(String(64))
    instructions: Mapped[str | None] = mapped_column(_LONG_TEXT)
    body: Mapped[dict[str, Any]] = mapped_column(_JSON)
    created_at: Mapped[float] = mapped_column(Double)


class KeyRow(Base):
    """One key; see ``KeyRecord``. ``digest``: SHA-256 of its secret, in hex."""

    __tablename__ = "agentkv_keys"
    __table_args__ = (Index(None, "digest", unique=True), Index(None, "name"))

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(128))
    digest: Mapped[str] = mapped_column(String(64))
    admin: Mapped[bool]
    requests_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    tokens_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    max_sessions: Mapped[int | None] = mapped_column(BigInteger)
    max_disk: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[float] = mapped_column(Double)
    revoked_at: Mapped[float | None] = mapped_column(Double)
    last_used_at: Mapped[float | None] = mapped_column(Double)


class TombstoneRow(Base):
    """A chunk that was deleted on purpose at unix second ``at``: an index rebuilt from files must not revive it."""

    __tablename__ = "agentkv_tombstones"

    chunk_id: Mapped[str] = mapped_column(String(255), primary_key=True)
    at: Mapped[float] = mapped_column(Double)
