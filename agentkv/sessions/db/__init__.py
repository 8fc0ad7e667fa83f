"""Sessions in SQL: the ledger is the truth, everything else can be derived from it."""

from agentkv.sessions.db.records import (
    ChunkCondemned,
    ChunkRecord,
    ItemRecord,
    LedgerConflict,
    Manifest,
    ManifestConflict,
    ResumePoint,
    SegmentRecord,
    SessionRecord,
    TurnRecord,
)
from agentkv.sessions.db.repository import Repository
from agentkv.sessions.db.transactions import Patience

__all__ = [
    "ChunkCondemned",
    "ChunkRecord",
    "ItemRecord",
    "LedgerConflict",
    "Manifest",
    "ManifestConflict",
    "Patience",
    "Repository",
    "ResumePoint",
    "SegmentRecord",
    "SessionRecord",
    "TurnRecord",
]
