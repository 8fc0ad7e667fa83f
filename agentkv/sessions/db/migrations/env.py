"""Alembic's entry point: runs the migrations on the connection, and in the transaction, that it is given.

From the command line (`alembic revision --autogenerate`) there is none: use `Repository.open`, which migrates.
"""

from __future__ import annotations

from alembic import context

from agentkv.sessions.db.schema import VERSION_TABLE, Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
