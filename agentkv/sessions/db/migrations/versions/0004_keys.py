"""Keys: who may talk to a server, and how much each may use."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """There are none so far."""
    op.create_table(
        "agentkv_keys",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("admin", sa.Boolean, nullable=False),
        sa.Column("requests_per_minute", sa.BigInteger),
        sa.Column("tokens_per_minute", sa.BigInteger),
        sa.Column("max_sessions", sa.BigInteger),
        sa.Column("max_disk", sa.BigInteger),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("revoked_at", sa.Double),
        sa.Column("last_used_at", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_agentkv_keys"),
    )
    op.create_index("ix_agentkv_keys_digest", "agentkv_keys", ["digest"], unique=True)
    op.create_index("ix_agentkv_keys_name", "agentkv_keys", ["name"])
    op.create_index("ix_agentkv_chunks_tenant", "agentkv_chunks", ["tenant"])
