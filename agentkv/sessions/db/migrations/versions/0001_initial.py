"""Sessions, their ledgers and manifests, and the index of stored chunks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _session_key() -> sa.Column[str]:
    return sa.Column("session_id", sa.String(64), nullable=False)


def _of_session(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["session_id"], ["agentkv_sessions.id"], name=f"fk_{table}_session_id", ondelete="CASCADE"
    )


def upgrade() -> None:
    """From nothing."""
    op.create_table(
        "agentkv_sessions",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("agent_id", sa.String(255)),
        sa.Column("model", sa.String(1024), nullable=False),
        sa.Column("kv_fingerprint", sa.String(128), nullable=False),
        sa.Column("session_fingerprint", sa.String(128), nullable=False),
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("idle_codec", sa.String(64), nullable=False),
        sa.Column("system", sa.Text().with_variant(sa.Text(2**24), "mysql", "mariadb")),
        sa.Column("tools", sa.JSON),
        sa.Column("template_args", sa.JSON, nullable=False),
        sa.Column("metadata", sa.JSON, nullable=False),
        sa.Column("pinned", sa.BigInteger, nullable=False),
        sa.Column("ledger_length", sa.BigInteger, nullable=False),
        sa.Column("kv_length", sa.BigInteger, nullable=False),
        sa.Column("turns", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_agentkv_sessions"),
    )
    op.create_index("ix_agentkv_sessions_tenant_created_at_id", "agentkv_sessions", ["tenant", "created_at", "id"])
    op.create_index(
        "ix_agentkv_sessions_tenant_agent_id_created_at_id",
        "agentkv_sessions",
        ["tenant", "agent_id", "created_at", "id"],
    )
    op.create_table(
        "agentkv_ledger",
        _session_key(),
        sa.Column("start", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("stop", sa.BigInteger, nullable=False),
        sa.Column("ids", sa.LargeBinary().with_variant(sa.LargeBinary(2**24), "mysql", "mariadb"), nullable=False),
        _of_session("agentkv_ledger"),
        sa.PrimaryKeyConstraint("session_id", "start", name="pk_agentkv_ledger"),
    )
    op.create_table(
        "agentkv_items",
        _session_key(),
        sa.Column("seq", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("turn", sa.Integer, nullable=False),
        sa.Column("role", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("content", sa.JSON, nullable=False),
        sa.Column("start", sa.BigInteger, nullable=False),
        sa.Column("stop", sa.BigInteger, nullable=False),
        sa.Column("generated", sa.Boolean, nullable=False),
        _of_session("agentkv_items"),
        sa.PrimaryKeyConstraint("session_id", "seq", name="pk_agentkv_items"),
    )
    op.create_index("ix_agentkv_items_id", "agentkv_items", ["id"], unique=True)
    op.create_table(
        "agentkv_turns",
        _session_key(),
        sa.Column("seq", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("start", sa.BigInteger, nullable=False),
        sa.Column("stop", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("finish_reason", sa.String(32)),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("seed", sa.BigInteger),
        sa.Column("restore", sa.JSON),
        sa.Column("created_at", sa.Double, nullable=False),
        _of_session("agentkv_turns"),
        sa.PrimaryKeyConstraint("session_id", "seq", name="pk_agentkv_turns"),
    )
    op.create_table(
        "agentkv_chunks",
        sa.Column("id", sa.String(255), nullable=False),
        sa.Column("lookup_key", sa.String(255), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("kv_fingerprint", sa.String(128), nullable=False),
        sa.Column("start", sa.BigInteger, nullable=False),
        sa.Column("stop", sa.BigInteger, nullable=False),
        sa.Column("codec", sa.String(64), nullable=False),
        sa.Column("nbytes", sa.BigInteger, nullable=False),
        sa.Column("refs", sa.Integer, nullable=False),
        sa.Column("deleting", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_agentkv_chunks"),
    )
    op.create_index("ix_agentkv_chunks_lookup_key", "agentkv_chunks", ["lookup_key"])
    op.create_index("ix_agentkv_chunks_refs_deleting", "agentkv_chunks", ["refs", "deleting"])
    op.create_table(
        "agentkv_segments",
        _session_key(),
        sa.Column("start", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("stop", sa.BigInteger, nullable=False),
        sa.Column("chunk_id", sa.String(255), nullable=False),
        _of_session("agentkv_segments"),
        sa.ForeignKeyConstraint(["chunk_id"], ["agentkv_chunks.id"], name="fk_agentkv_segments_chunk_id"),
        sa.PrimaryKeyConstraint("session_id", "start", name="pk_agentkv_segments"),
    )
    op.create_index("ix_agentkv_segments_chunk_id", "agentkv_segments", ["chunk_id"])
    op.create_table(
        "agentkv_resume_points",
        _session_key(),
        sa.Column("position", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("kind", sa.String(32), nullable=False),
        _of_session("agentkv_resume_points"),
        sa.PrimaryKeyConstraint("session_id", "position", "kind", name="pk_agentkv_resume_points"),
    )
    op.create_table(
        "agentkv_tombstones",
        sa.Column("chunk_id", sa.String(255), nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("chunk_id", name="pk_agentkv_tombstones"),
    )
