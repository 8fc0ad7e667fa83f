"""Where a session was forked from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """No session has a parent so far."""
    op.add_column("agentkv_sessions", sa.Column("parent_id", sa.String(64)))
    op.add_column("agentkv_sessions", sa.Column("forked_at", sa.BigInteger))
    op.add_column("agentkv_sessions", sa.Column("clock", sa.Double))
    op.create_index("ix_agentkv_sessions_parent_id", "agentkv_sessions", ["parent_id"])
