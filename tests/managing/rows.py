"""What SQL holds, read past the runtime: a connection of its own, plain statements, one moment of time."""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soaking.oracle import Violation

from agentkv.sessions.db.records import ItemRecord, Manifest, ResumePoint, SegmentRecord, TurnRecord, unpack_placement
from agentkv.types import Placement, Span

__all__ = ["ChunkRow", "Rows", "SessionRow", "rows_of"]


@dataclass(frozen=True)
class SessionRow:
    """What of a session's row takes part in invariants. ``held``: what its KV state held at the last commit."""

    policy: str
    policy_since: int
    turns: int
    ledger_length: int
    kv_length: int
    pinned: int
    state: str
    placement: Placement | None

    @property
    def held(self) -> Placement:
        return self.placement or Placement.whole(self.kv_length)


@dataclass(frozen=True)
class ChunkRow:
    refs: int
    deleting: bool
    nbytes: int


class Rows:
    """One transaction's view of a home's database."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def _all(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        return self._db.execute(statement, values).fetchall()

    def sessions(self) -> dict[str, SessionRow]:
        """By id."""
        return {
            row["id"]: SessionRow(
                row["policy"],
                row["policy_since"],
                row["turns"],
                row["ledger_length"],
                row["kv_length"],
                row["pinned"],
                row["state"],
                unpack_placement(json.loads(row["placement"]) if row["placement"] else None),
            )
            for row in self._all("SELECT * FROM agentkv_sessions")
        }

    def ledger(self, session_id: str) -> list[int]:
        """Its token ids; they lie in rows without gap or overlap."""
        ids = array("i")
        for row in self._all("SELECT * FROM agentkv_ledger WHERE session_id = ? ORDER BY start", session_id):
            if row["start"] != len(ids) or len(row["ids"]) != 4 * (row["stop"] - row["start"]):
                raise Violation(f"the ledger of {session_id} has [{row['start']}, {row['stop']}) behind {len(ids)}")
            ids.frombytes(row["ids"])
        return list(ids)

    def turns(self, session_id: str) -> list[TurnRecord]:
        """In order."""
        return [
            TurnRecord(
                row["seq"],
                Span(row["start"], row["stop"]),
                row["kind"],
                row["finish_reason"],
                row["prompt_tokens"],
                row["completion_tokens"],
                row["cached_tokens"],
                row["seed"],
                json.loads(row["restore"]) if row["restore"] else None,
                row["created_at"],
            )
            for row in self._all("SELECT * FROM agentkv_turns WHERE session_id = ? ORDER BY seq", session_id)
        ]

    def items(self, session_id: str) -> list[ItemRecord]:
        """In order."""
        return [
            ItemRecord(
                row["id"],
                row["seq"],
                row["turn"],
                row["role"],
                row["kind"],
                json.loads(row["content"]),
                Span(row["start"], row["stop"]),
                bool(row["generated"]),
            )
            for row in self._all("SELECT * FROM agentkv_items WHERE session_id = ? ORDER BY seq", session_id)
        ]

    def manifest(self, session_id: str) -> Manifest:
        """Its stored KV."""
        mine = "WHERE session_id = ? ORDER BY"
        segments = self._all(f"SELECT * FROM agentkv_segments {mine} start", session_id)
        points = self._all(f"SELECT * FROM agentkv_resume_points {mine} position, kind", session_id)
        return Manifest(
            tuple(SegmentRecord(row["chunk_id"], Span(row["start"], row["stop"])) for row in segments),
            tuple(
                ResumePoint(
                    row["position"],
                    row["kind"],
                    unpack_placement(json.loads(row["placement"]) if row["placement"] else None),
                )
                for row in points
            ),
        )

    def chunks(self) -> dict[str, ChunkRow]:
        """The index of chunk files."""
        rows = self._all("SELECT * FROM agentkv_chunks")
        return {row["id"]: ChunkRow(row["refs"], bool(row["deleting"]), row["nbytes"]) for row in rows}

    def uses(self) -> Counter[str]:
        """How many segments name each chunk."""
        return Counter(row["chunk_id"] for row in self._all("SELECT chunk_id FROM agentkv_segments"))

    def mentioned(self) -> dict[str, set[str]]:
        """Which sessions each table has rows of: every table with such a column, whatever it is called."""
        found = {"agentkv_sessions": {row["id"] for row in self._all("SELECT id FROM agentkv_sessions")}}
        for (table,) in self._all("SELECT name FROM sqlite_master WHERE type = 'table'"):
            if any(column["name"] == "session_id" for column in self._all(f"PRAGMA table_info({table})")):
                found[table] = {row["session_id"] for row in self._all(f"SELECT DISTINCT session_id FROM {table}")}
        return found


@contextmanager
def rows_of(home: Path) -> Iterator[Rows]:
    """Of a home whose runtime is open; it may go on meanwhile."""
    with closing(sqlite3.connect(home / "agentkv.db", isolation_level=None, timeout=10)) as db:
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA query_only = 1")
        db.execute("BEGIN")
        yield Rows(db)
