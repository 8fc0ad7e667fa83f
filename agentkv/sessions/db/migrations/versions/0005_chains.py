"""How sessions of clients that hold no id are found: chains of items, names, cache keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """All sessions so far were named by their ids; their items are found again from their next turn on."""
    op.add_column("agentkv_items", sa.Column("chain", sa.String(64)))
    op.create_index("ix_agentkv_items_chain", "agentkv_items", ["chain"])
    op.add_column("agentkv_sessions", sa.Column("anonymous", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("agentkv_sessions", sa.Column("name", sa.String(200)))
    op.add_column("agentkv_sessions", sa.Column("cache_key", sa.String(200)))
    op.create_index("ix_agentkv_sessions_tenant_name", "agentkv_sessions", ["tenant", "name"], unique=True)
    columns = ["anonymous", "tenant", "updated_at"]
    op.create_index("ix_agentkv_sessions_anonymous_tenant_updated_at", "agentkv_sessions", columns)
