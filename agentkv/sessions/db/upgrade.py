"""Bring a database to the schema of this version, when it is opened."""

from __future__ import annotations

from sqlalchemy import column, inspect, select, table, text
from sqlalchemy.orm import Session

from agentkv.errors import InvalidRequest
from agentkv.sessions.db.schema import REVISIONS, VERSION_TABLE
from agentkv.sessions.db.transactions import Transactions

__all__ = ["revision", "upgrade"]

_ADVISORY_LOCK = 0x61676B76


def revision(db: Session) -> str | None:
    """The schema revision of the database; ``None`` where there is no agentkv schema yet."""
    if not inspect(db.connection()).has_table(VERSION_TABLE):
        return None
    found = db.scalar(select(column("version_num")).select_from(table(VERSION_TABLE)))
    return None if found is None else str(found)


async def upgrade(transactions: Transactions) -> None:
    """Run the migrations that are missing, all in one transaction; an up-to-date database costs one look.

    Raises ``InvalidRequest`` for a database that a newer version has written.
    """
    if await transactions.read(_needs_migration):
        await transactions.write(_migrate)


def _needs_migration(db: Session) -> bool:
    found = revision(db)
    if found is not None and found not in REVISIONS:
        raise InvalidRequest(
            f"the database has schema revision {found!r}, this agentkv knows up to {REVISIONS[-1]!r}: it was written "
            f"by a newer version. Upgrade agentkv, or open another database",
            param="database",
        )
    return found != REVISIONS[-1]


def _migrate(db: Session) -> None:
    # Two processes may open a new database at once: the second waits here, and finds the work done.
    connection = db.connection()
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
    if not _needs_migration(db):
        return

    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "agentkv.sessions.db:migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
