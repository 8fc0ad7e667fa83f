"""Which tokens a session's KV state holds, under policies that evict."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Nothing was ever evicted so far, which is what NULL says."""
    op.add_column("agentkv_sessions", sa.Column("placement", sa.JSON))
    op.add_column("agentkv_sessions", sa.Column("policy_since", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("agentkv_resume_points", sa.Column("placement", sa.JSON))
