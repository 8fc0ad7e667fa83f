"""From a database URL to an async engine with the settings that durability needs."""

from __future__ import annotations

import contextlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from agentkv.errors import InvalidRequest, StorageFull

__all__ = ["WRITE", "async_url", "is_memory", "open_engine"]

WRITE = "agentkv_write"
"""Execution option of a connection: its transaction is going to write."""

_ASYNC_DRIVERS = {
    "sqlite": ("aiosqlite",),
    "postgresql": ("asyncpg", "psycopg"),
    "mysql": ("asyncmy", "aiomysql"),
    "mariadb": ("asyncmy", "aiomysql"),
}


def async_url(url: str) -> URL:
    """The URL with an async driver that is installed: ``sqlite:///x`` becomes ``sqlite+aiosqlite:///x``.

    Raises ``InvalidRequest`` for what is no URL, for a database without an async driver, and where none is installed.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise InvalidRequest(
            "the database URL cannot be read; write e.g. sqlite:///path/to/agentkv.db", param="database"
        ) from error
    backend, _, driver = parsed.drivername.partition("+")
    backend = "postgresql" if backend == "postgres" else backend
    drivers = _ASYNC_DRIVERS.get(backend)
    if drivers is None:
        raise InvalidRequest(
            f"database {backend!r} has no async driver that agentkv knows; use one of {', '.join(_ASYNC_DRIVERS)}",
            param="database",
        )
    wanted = (driver,) if driver in drivers else drivers
    for name in wanted:
        if find_spec(name) is not None:
            return parsed.set(drivername=f"{backend}+{name}")
    raise InvalidRequest(
        f"database {backend!r} needs the driver {' or '.join(wanted)}, which is not installed: pip install {wanted[0]}",
        param="database",
    )


def is_memory(url: URL) -> bool:
    """Whether this is an SQLite database without a file: one connection, shared by all transactions."""
    name = url.database or ""
    return url.get_backend_name() == "sqlite" and (
        name in ("", ":memory:") or ":memory:" in name or url.query.get("mode") == "memory"
    )


def open_engine(url: URL, *, busy_seconds: float) -> AsyncEngine:
    """An engine for a URL from ``async_url``; creates an SQLite file that is missing, and takes others' access away.

    Connects to nothing yet. ``busy_seconds`` is how long one SQLite statement waits for another's lock.
    """
    if url.get_backend_name() != "sqlite":
        return create_async_engine(url, pool_pre_ping=True, pool_size=5, max_overflow=5)
    options: dict[str, Any] = {"connect_args": {"timeout": busy_seconds}}
    if not is_memory(url):
        _make_private(_sqlite_path(url))
        options |= {"pool_size": 4, "max_overflow": 4}
    engine = create_async_engine(url, **options)

    # Python's sqlite3 begins a transaction at the first INSERT only, and DEFERRED: SELECTs before it are outside, and
    # the later upgrade to a write lock fails at once instead of waiting. So the driver is told to begin nothing, and
    # SQLAlchemy begins with the right kind (its documented recipe for all Python versions).
    @event.listens_for(engine.sync_engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        try:
            connection.isolation_level = None
            with contextlib.closing(connection.cursor()) as cursor:
                cursor.execute(f"PRAGMA busy_timeout = {round(busy_seconds * 1000)}")
                cursor.execute("PRAGMA journal_mode = WAL")
                cursor.execute("PRAGMA synchronous = FULL")
                cursor.execute("PRAGMA foreign_keys = ON")
        except BaseException:
            connection.close()  # the pool does not know it yet, and would only drop it
            raise

    # A cancelled statement invalidates its connection, and that closes it. But SQLite keeps a closed connection, its
    # transaction and its write lock alive while a cursor of it is: until the garbage collector finds the traceback.
    @event.listens_for(engine.sync_engine, "invalidate")
    def _let_go(connection: Any, _record: Any, _error: BaseException | None) -> None:
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.rollback()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Connection) -> None:
        write = connection.get_execution_options().get(WRITE, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _sqlite_path(url: URL) -> Path:
    return Path((url.database or "").removeprefix("file:").partition("?")[0])


def _make_private(path: Path) -> None:
    # SQLite gives -wal and -shm the mode of the database file, so a private file has private companions.
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            for existing in (path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))):
                if existing.exists() and existing.stat().st_mode & 0o077:
                    existing.chmod(0o600)
            return
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StorageFull(f"the database file {path} cannot be created or made private: {error}") from error
