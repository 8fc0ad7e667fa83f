"""Whole transactions: retried while that can help, finished even when the caller goes away."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import URL
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from agentkv.errors import AgentKVError, Closed, DatabaseUnavailable, InvalidRequest, StorageFull
from agentkv.sessions.db.engine import WRITE, is_memory, open_engine

__all__ = ["Patience", "Transactions"]

T = TypeVar("T")

# PostgreSQL: serialization failure, deadlock, lock not available, shutdown, cannot connect now, too many connections.
_TRANSIENT_SQLSTATES = frozenset({"40001", "40P01", "55P03", "57P01", "57P02", "57P03", "53300"})
_FULL_SQLSTATES = frozenset({"53100", "25006"})


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to try: ``attempts`` at a whole transaction, pauses that double from ``pause_seconds`` (± half).

    ``busy_seconds``: how long SQLite itself waits for a lock within one attempt.
    """

    attempts: int = 3
    pause_seconds: float = 0.05
    busy_seconds: float = 5.0


class Transactions:
    """Runs plain functions of a SQLAlchemy session, each as one transaction."""

    def __init__(self, url: URL, patience: Patience) -> None:
        self.engine = open_engine(url, busy_seconds=patience.busy_seconds)
        self._patience = patience
        self._name = url.render_as_string(hide_password=True)
        self._running: set[asyncio.Task[object]] = set()
        self._closed = False
        # SQLite has one writer. Waiting here is fair and immediate; SQLite's own wait polls, up to 100 ms apart.
        self._write_gate = asyncio.Lock() if url.get_backend_name() == "sqlite" else None
        self._read_gate = self._write_gate if is_memory(url) else None

    async def read(self, work: Callable[[Session], T]) -> T:
        """``work`` in a transaction of its own that is rolled back. Raises ``DatabaseUnavailable``."""
        return await self._finish(work, write=False)

    async def write(self, work: Callable[[Session], T]) -> T:
        """``work`` in one transaction, committed when it returns and rolled back when it raises.

        ``work`` may run several times, and must change nothing but the database. A cancelled caller gets its
        ``CancelledError`` once the transaction has ended, either way: nothing runs on behind its back.
        Raises ``DatabaseUnavailable`` (after bounded retries), ``StorageFull``, ``Closed``, and what ``work`` raises.
        """
        return await self._finish(work, write=True)

    async def close(self) -> None:
        """Wait for what is running, then close all connections. A second call does nothing."""
        self._closed = True
        if self._running:
            await asyncio.wait(self._running)
        await self.engine.dispose()

    async def _finish(self, work: Callable[[Session], T], *, write: bool) -> T:
        # Own task: a cancellation that hits SQLAlchemy between statements would cost the connection, and one that
        # hits it during COMMIT would leave the caller not knowing.
        if self._closed:
            raise Closed(f"the database {self._name} is closed")
        abandoned = asyncio.Event()
        task = asyncio.create_task(self._attempts(work, write=write, abandoned=abandoned))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
                abandoned.set()
        if cancelled is not None:
            if not task.cancelled():
                task.exception()
            raise cancelled
        return task.result()

    async def _attempts(self, work: Callable[[Session], T], *, write: bool, abandoned: asyncio.Event) -> T:
        began = time.monotonic()
        pause = self._patience.pause_seconds
        for attempt in range(1, self._patience.attempts + 1):
            try:
                async with self._gate(write):
                    if abandoned.is_set():
                        raise asyncio.CancelledError
                    return await self._once(work, write=write)
            except (UnicodeEncodeError, OverflowError) as error:
                raise InvalidRequest(f"a value cannot be stored: {error}") from error
            except (SQLAlchemyError, OSError) as error:
                if (fault := _value_fault(error)) is not None:
                    raise InvalidRequest(f"a value cannot be stored: {fault}") from error
                if not _is_transient(error):
                    raise self._translate(error) from error
                if attempt == self._patience.attempts:
                    raise DatabaseUnavailable(
                        f"the database {self._name} stayed locked or unreachable for {time.monotonic() - began:.1f} s "
                        f"over {attempt} attempts ({_words(error)}); nothing was written. Is another process using it?"
                    ) from error
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(abandoned.wait(), pause * random.uniform(0.5, 1.5))
            pause *= 2
        raise AssertionError("at least one attempt is made")

    async def _once(self, work: Callable[[Session], T], *, write: bool) -> T:
        async with self.engine.connect() as connection:
            await connection.execution_options(**{WRITE: write})
            transaction = await connection.begin()
            try:
                result = await connection.run_sync(lambda sync: _in_session(sync, work))
            except BaseException:
                if transaction.is_active:  # a failed flush has rolled back already
                    await transaction.rollback()
                raise
            if not write:
                await transaction.rollback()
                return result
            try:
                await transaction.commit()
            except (DBAPIError, OSError) as error:
                if isinstance(error, OSError) or error.connection_invalidated:
                    raise DatabaseUnavailable(
                        f"the connection to {self._name} was lost during COMMIT: the transaction is there as a whole "
                        f"or not at all. Read the session before trying again"
                    ) from error
                raise
            return result

    @contextlib.asynccontextmanager
    async def _gate(self, write: bool) -> AsyncIterator[None]:
        gate = self._write_gate if write else self._read_gate
        if gate is None:
            yield
            return
        async with gate:
            yield

    def _translate(self, error: SQLAlchemyError | OSError) -> AgentKVError:
        if isinstance(error, StatementError) and not isinstance(error, DBAPIError):
            return InvalidRequest(f"a value cannot be stored: {_words(error)}")
        if _is_full(error):
            return StorageFull(f"the database {self._name} cannot be written ({_words(error)}); free space there")
        return DatabaseUnavailable(f"the database {self._name} cannot be used: {_words(error)}")


def _in_session(connection: object, work: Callable[[Session], T]) -> T:
    # Closing a session that was bound to a begun connection leaves that connection's transaction alone.
    with Session(bind=connection, expire_on_commit=False, join_transaction_mode="rollback_only") as session:  # type: ignore[arg-type]
        result = work(session)
        session.flush()
        return result


def _codes(error: BaseException) -> tuple[int | None, str]:
    """SQLite's primary result code and the SQLSTATE, where the driver tells."""
    origin: object = getattr(error, "orig", None)
    code = getattr(origin, "sqlite_errorcode", None)
    state = getattr(origin, "sqlstate", None) or getattr(origin, "pgcode", None) or ""
    return (code & 0xFF if isinstance(code, int) else None), str(state)


def _value_fault(error: BaseException | None) -> BaseException | None:
    """What is wrong with a value, where a driver (asyncpg) wraps it into an error of its own."""
    while error is not None and not isinstance(error, UnicodeEncodeError | OverflowError):
        error = error.__cause__
    return error


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, OSError | PoolTimeout):
        return True
    code, state = _codes(error)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return True
    if state in _TRANSIENT_SQLSTATES or state.startswith("08"):
        return True
    return isinstance(error, DBAPIError) and error.connection_invalidated


def _is_full(error: BaseException) -> bool:
    code, state = _codes(error)
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY) or state in _FULL_SQLSTATES


def _words(error: BaseException) -> str:
    return str(getattr(error, "orig", None) or error)
