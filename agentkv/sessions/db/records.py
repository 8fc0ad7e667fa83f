"""What the database holds, as plain values. Nothing here imports sqlalchemy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agentkv.errors import AgentKVError
from agentkv.types import Placement, Span

__all__ = [
    "BY_ID",
    "Caller",
    "ChunkCondemned",
    "ChunkFacts",
    "ChunkRecord",
    "Cut",
    "DiskUse",
    "ItemKind",
    "ItemRecord",
    "KeyRecord",
    "LedgerConflict",
    "Manifest",
    "ManifestConflict",
    "Node",
    "ResponseRecord",
    "ResumePoint",
    "SegmentRecord",
    "SessionRecord",
    "StoredState",
    "TurnKind",
    "TurnRecord",
    "pack_placement",
    "unpack_placement",
]

StoredState = Literal["new", "live", "host", "disk"]
ItemKind = Literal["message", "tool_call", "tool_result", "tokens"]
TurnKind = Literal["send", "append", "continue", "head"]


class LedgerConflict(AgentKVError):
    """The ledger is not where this writer believed: someone else wrote in between. Nothing was written."""


class ManifestConflict(AgentKVError):
    """Segments, chunks or resume points contradict the manifest. Nothing was written."""


class ChunkCondemned(ManifestConflict):
    """A chunk is being deleted by the sweep, its file may be gone. Nothing was written.

    Wait until the sweep has forgotten ``chunk_id``, write the file anew, and append again.
    """

    def __init__(self, chunk_id: str) -> None:
        super().__init__(f"chunk {chunk_id} is being deleted; write its file again once the sweep has forgotten it")
        self.chunk_id = chunk_id


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One session's row.

    ``pinned``: tokens of the pinned prefix. ``kv_length``: tokens of KV that existed at the last commit (the last
    generated token has none yet); ``placement``: which of them are held, ``None`` for all. ``policy_since``:
    ``kv_length`` when the policy was set: all evictions from there on are its own. ``created_at``, ``updated_at``: unix
    seconds. ``parent_id``: the session that it was forked from, at its own ledger position ``forked_at``; it may be
    deleted by now. ``clock``: the time that its template is told, ``None`` for ``created_at``. ``anonymous``: no client
    has named it, and it goes when it has been idle for long; ``name``: what its clients call it; ``cache_key``: of the
    requests that it answers; ``instructions``: the beginning of ``system`` that responses replace.
    """

    id: str
    tenant: str
    agent_id: str | None
    model: str
    kv_fingerprint: str
    session_fingerprint: str
    policy: str
    idle_codec: str
    system: str | None
    tools: list[Any] | None
    template_args: dict[str, Any]
    metadata: dict[str, Any]
    pinned: int
    ledger_length: int
    kv_length: int
    turns: int
    created_at: float
    updated_at: float
    state: StoredState = "new"
    placement: Placement | None = None
    policy_since: int = 0
    parent_id: str | None = None
    forked_at: int | None = None
    clock: float | None = None
    anonymous: bool = False
    name: str | None = None
    cache_key: str | None = None
    instructions: str | None = None

    @property
    def held(self) -> Placement:
        """What the KV state held at the last commit."""
        return self.placement or Placement.whole(self.kv_length)


@dataclass(frozen=True, slots=True)
class ItemRecord:
    """One message, tool call or tool result; ``content`` is its canonical message.

    ``chain``: digest of the conversation up to and with it; ``None`` where raw tokens are among it, for the head, and
    where it was stored before there were chains.
    """

    id: str
    seq: int
    turn: int
    role: str
    kind: ItemKind
    content: Any
    span: Span
    generated: bool
    chain: str | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a session is made for: see the fields of the same names of ``SessionRecord``."""

    anonymous: bool = False
    name: str | None = None
    cache_key: str | None = None


BY_ID = Caller()
"""Whoever holds its id."""


@dataclass(frozen=True, slots=True)
class Node:
    """A place where a conversation can go on: behind ``item``, in a ledger of ``session``."""

    session: SessionRecord
    item: ItemRecord

    @property
    def head(self) -> bool:
        """Whether nothing follows there."""
        return self.item.span.stop == self.session.ledger_length


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """What one turn added to the ledger. ``seq`` counts from 0; ``created_at`` is in unix seconds."""

    seq: int
    span: Span
    kind: TurnKind
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seed: int | None
    restore: dict[str, Any] | None
    created_at: float

    @property
    def known_tokens(self) -> int:
        """Tokens whose KV there was, or should have been, before it: reused, or computed again."""
        found = self.restore or {}
        return int(found.get("tokens", 0)) + int(found.get("recomputed_tokens", 0))


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a conversation of ``length`` tokens is cut in two: behind its first ``items`` items, at ``position``.

    ``turns``: those that begin before. ``kv_length`` and ``placement``: the KV that a session which ends here starts
    from, as in ``SessionRecord``; the rest of its ledger has none.
    """

    length: int
    position: int
    items: int
    turns: int
    kv_length: int
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One stored chunk; ``nbytes`` is the size of its file."""

    id: str
    lookup_key: str
    tenant: str
    kv_fingerprint: str
    span: Span
    codec: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """One row of the chunk index, and how many ``sessions`` use the chunk."""

    id: str
    codec: str
    kv_fingerprint: str
    nbytes: int
    sessions: int


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A response that a client can come back to: it ends with item ``item_id`` of its session.

    ``session_id``, ``item_id``: ``None`` where nothing was committed. ``instructions``: those that it was made under,
    a beginning of its session's system prompt. ``body``: the response as it was sent.
    """

    id: str
    tenant: str
    session_id: str | None
    item_id: str | None
    instructions: str | None
    body: dict[str, Any]
    created_at: float


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key, which is a tenant: ``id``, ``key_…``, is whom its sessions belong to. Its secret is kept nowhere.

    ``admin``: whether it may do what concerns all tenants. ``max_disk``: bytes of stored KV. Limits are ``None`` where
    there is none; the two rates are for a server to hold. Times are unix seconds.
    """

    id: str
    name: str
    admin: bool
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_sessions: int | None
    max_disk: int | None
    created_at: float
    revoked_at: float | None = None
    last_used_at: float | None = None

    @property
    def tenant(self) -> str:
        """Whose sessions it may use: ``kv.tenant(key.tenant)``."""
        return self.id


@dataclass(frozen=True, slots=True)
class DiskUse:
    """``used`` of ``limit`` bytes of stored KV are the sessions' of the key called ``name``."""

    name: str
    limit: int
    used: int


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """The part ``span`` of the ledger that a manifest takes from a chunk; may be shorter than the chunk.

    ``codec``: the chunk's, where the manifest was read from the database.
    """

    chunk_id: str
    span: Span
    codec: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, order=True)
class ResumePoint:
    """A ledger position at which everything needed to go on is stored: ``placement``, where ``None`` is all."""

    position: int
    kind: str
    placement: Placement | None = field(default=None, compare=False)

    @property
    def held(self) -> Placement:
        """What a state restored to this point holds."""
        return self.placement or Placement.whole(self.position)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A session's stored KV: segments and resume points, in ledger order. Gaps are what a policy has evicted."""

    segments: tuple[SegmentRecord, ...] = ()
    resume_points: tuple[ResumePoint, ...] = ()

    @property
    def length(self) -> int:
        """Ledger tokens up to which everything that was to be stored is stored."""
        stored = self.segments[-1].span.stop if self.segments else 0
        return max(stored, self.resume_points[-1].position) if self.resume_points else stored

    def up_to(self, position: int) -> Manifest:
        """What of this manifest lies before ``position``."""
        if self.length <= position:
            return self
        segments = (replace(s, span=s.span.intersect(Span(0, position))) for s in self.segments)
        points = tuple(point for point in self.resume_points if point.position <= position)
        return Manifest(tuple(s for s in segments if len(s.span)), points)

    def followed_by(self, more: Manifest) -> Manifest:
        """This manifest continued by ``more``, which begins where this one ends."""
        return Manifest(self.segments + more.segments, self.resume_points + more.resume_points)


def pack_placement(placement: Placement | None) -> dict[str, Any] | None:
    """As JSON; ``None`` where everything is held at its own position."""
    if placement is None or placement.trivial:
        return None
    return {
        "length": placement.length,
        "kept": [list(span) for span in placement.kept],
        "bases": [list(pair) for pair in placement.bases],
        "lineage": placement.lineage,
        "floor": placement.floor,
    }


def unpack_placement(packed: dict[str, Any] | None) -> Placement | None:
    """Back from JSON."""
    if packed is None:
        return None
    kept = tuple(Span(start, stop) for start, stop in packed["kept"])
    bases = tuple((index, base) for index, base in packed["bases"])
    return Placement(packed["length"], kept, bases, packed["lineage"], packed["floor"])
