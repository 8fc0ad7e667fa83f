"""Responses that clients come back to, and the part of a system prompt that they replace."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """There are none so far."""
    long_text = sa.Text().with_variant(sa.Text(2**24), "mysql", "mariadb")
    op.create_table(
        "agentkv_responses",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("session_id", sa.String(64)),
        sa.Column("item_id", sa.String(64)),
        sa.Column("instructions", long_text),
        sa.Column("body", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_agentkv_responses"),
        sa.ForeignKeyConstraint(
            ["session_id"],
            ["agentkv_sessions.id"],
            name="fk_agentkv_responses_session_id",
            ondelete="CASCADE",
        ),
    )
    op.create_index("ix_agentkv_responses_session_id", "agentkv_responses", ["session_id"])
    op.add_column("agentkv_sessions", sa.Column("instructions", long_text))
