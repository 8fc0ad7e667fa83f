"""The one door to the database: every method is one transaction."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Self

from sqlalchemy import text
from sqlalchemy.orm import Session

from agentkv.sessions.db import branching, chunks, keys, ledger, manifest, nodes, responses, rewriting, whole
from agentkv.sessions.db.engine import async_url
from agentkv.sessions.db.records import (
    ChunkFacts,
    ChunkRecord,
    Cut,
    DiskUse,
    ItemRecord,
    KeyRecord,
    Manifest,
    Node,
    ResponseRecord,
    ResumePoint,
    SegmentRecord,
    SessionRecord,
    StoredState,
    TurnRecord,
)
from agentkv.sessions.db.transactions import Patience, Transactions
from agentkv.sessions.db.upgrade import revision, upgrade
from agentkv.sessions.db.whole import WholeSession
from agentkv.types import Placement, Span

__all__ = ["Repository"]


class Repository:
    """Sessions, ledgers, manifests and the chunk index in SQL. Open with ``async with await Repository.open(url)``.

    Every method may raise ``DatabaseUnavailable`` after bounded retries, ``StorageFull``, and ``Closed``. A method
    that raises has written nothing. The exception is a cancelled one: it raises ``CancelledError`` only once its
    transaction has ended, and that may have been committed. Methods of a session raise ``SessionNotFound``.
    """

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    @classmethod
    async def open(cls, url: str, *, patience: Patience | None = None) -> Repository:
        """Connect, creating and migrating as needed. Raises ``InvalidRequest`` for a database it cannot work with."""
        transactions = await asyncio.to_thread(Transactions, async_url(url), patience or Patience())
        try:
            await upgrade(transactions)
        except BaseException:
            await transactions.close()
            raise
        return cls(transactions)

    async def close(self) -> None:
        """Wait for what is running and close the connections; a second call does nothing."""
        await self._transactions.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def ping(self) -> None:
        """Returns if the database answers."""
        await self._transactions.read(lambda db: db.execute(text("SELECT 1")).close())

    async def version(self) -> str:
        """The schema revision of the database."""
        return await self._transactions.read(revision) or ""

    async def create_session(
        self, record: SessionRecord, items: Sequence[ItemRecord], ids: Sequence[int], turn: TurnRecord | None
    ) -> None:
        """Store a new session, with the items, token ids and turn that its head put into the ledger.

        Raises ``InvalidRequest`` where the record's lengths contradict them, or the id is taken; this, a fork and an
        import raise ``LimitExceeded`` where the tenant's key allows no more sessions.
        """
        packed = ledger.pack_ids(ids)
        await self._transactions.write(lambda db: ledger.create_session(db, record, items, packed, turn))

    async def get_session(self, session_id: str, tenant: str = "default") -> SessionRecord:
        """The session; another tenant's is not found."""
        return await self._transactions.read(partial(ledger.get_session, session_id=session_id, tenant=tenant))

    async def list_sessions(
        self, tenant: str | None = "default", agent_id: str | None = None, limit: int = 100, before: str | None = None
    ) -> list[SessionRecord]:
        """One tenant's, or all where ``None``; newest first. ``before``: the last id of the previous page."""
        return await self._transactions.read(lambda db: ledger.list_sessions(db, tenant, agent_id, limit, before))

    async def count_sessions(self, tenant: str | None = None) -> int:
        """Sessions of one tenant, or of all."""
        return await self._transactions.read(lambda db: ledger.count_sessions(db, tenant))

    async def whole_session(self, session_id: str, tenant: str = "default") -> WholeSession:
        """The session with everything that belongs to it, as of one moment."""
        return await self._transactions.read(lambda db: whole.read_whole(db, session_id, tenant))

    async def import_session(self, session: WholeSession, new_chunks: Sequence[ChunkRecord]) -> None:
        """Store a session that was made elsewhere, all of it; ``new_chunks``: those that its manifest names.

        Raises ``InvalidRequest`` where its id is taken, ``ManifestConflict`` and ``LedgerConflict`` where it
        contradicts itself.
        """
        await self._transactions.write(lambda db: whole.insert_whole(db, session, new_chunks))

    async def update_session(self, session_id: str, tenant: str = "default", **fields: Any) -> SessionRecord:
        """Set fields that may change between turns, and return the new record.

        These are ``agent_id``, ``metadata``, ``idle_codec``, ``model``, ``policy``, the two fingerprints, and, without
        touching ``updated_at``, ``state``, ``kv_length``, ``pinned``, ``policy_since``, ``anonymous``. Any other raises
        ``InvalidRequest``.
        """
        return await self._transactions.write(lambda db: ledger.update_session(db, session_id, tenant, fields))

    async def delete_session(self, session_id: str, tenant: str = "default") -> list[str]:
        """Delete a session. Returns the chunks that lost their last reference; the sweep can claim them now."""
        return await self._transactions.write(lambda db: manifest.delete_session(db, session_id, tenant))

    async def reset_states(self) -> int:
        """At start-up: every session whose state is not ``new`` is on ``disk``. Returns how many changed."""
        return await self._transactions.write(ledger.reset_states)

    async def commit_turn(
        self,
        session_id: str,
        turn: TurnRecord,
        items: Sequence[ItemRecord],
        ids: Sequence[int],
        *,
        expect_length: int,
        kv_length: int,
        pinned: int | None = None,
        state: StoredState | None = None,
        placement: Placement | None = None,
        policy: str | None = None,
        policy_since: int = 0,
        instead_of: Cut | None = None,
    ) -> None:
        """Append a turn, whole or not at all: its ids, items, the turn itself and the session's counters.

        ``expect_length``: the ledger length this turn started from. Raises ``LedgerConflict`` if the ledger is
        elsewhere (two writers), ``InvalidRequest`` where spans contradict the ids. ``state``, and ``policy`` with
        ``policy_since``, change in the same transaction where given. ``instead_of``: the turn takes the place of what
        lies behind that cut, where it started; chunks that lose their last reference with it are left to the next
        sweep.
        """
        packed = ledger.pack_ids(ids)

        def work(db: Session) -> None:
            if instead_of is not None:
                branching.rewind_session(db, session_id, None, instead_of)
            ledger.commit_turn(
                db,
                session_id,
                turn,
                items,
                packed,
                expect_length=expect_length,
                kv_length=kv_length,
                pinned=pinned,
                state=state,
                placement=placement,
                policy=policy,
                policy_since=policy_since,
            )

        await self._transactions.write(work)

    async def fork_session(self, source_id: str, record: SessionRecord, cut: Cut, tenant: str = "default") -> None:
        """Store a new session that begins as ``source_id`` up to ``cut``, with the same stored KV.

        Raises ``LedgerConflict`` where the source is not as long as the cut says.
        """
        await self._transactions.write(lambda db: branching.fork_session(db, source_id, tenant, record, cut))

    async def rewind_session(self, session_id: str, cut: Cut, tenant: str = "default") -> list[str]:
        """End the session at ``cut``. Returns the chunks that lost their last reference.

        Raises ``LedgerConflict`` where its ledger is not as long as the cut says.
        """
        return await self._transactions.write(lambda db: branching.rewind_session(db, session_id, tenant, cut))

    async def rewrite_session(
        self,
        record: SessionRecord,
        items: Sequence[ItemRecord],
        ids: Sequence[int],
        turns: Sequence[TurnRecord],
        expect_length: int,
    ) -> list[str]:
        """The session is ``record`` from now on, with these items and ``turns`` that fill ``ids``, and without KV.

        Raises ``LedgerConflict`` where it is not ``expect_length`` long. Returns the chunks that lost their last
        reference.
        """
        return await self._transactions.write(
            lambda db: rewriting.rewrite_session(db, record, items, ids, turns, expect_length)
        )

    async def add_response(self, record: ResponseRecord) -> bool:
        """Keep a response. ``False`` where its session is not there any more."""
        return await self._transactions.write(lambda db: responses.add_response(db, record))

    async def get_response(self, response_id: str, tenant: str = "default") -> ResponseRecord:
        """Raises ``ResponseNotFound``, also for another tenant's."""
        return await self._transactions.read(lambda db: responses.get_response(db, response_id, tenant))

    async def delete_response(self, response_id: str, tenant: str = "default") -> None:
        """Its session stays. Raises ``ResponseNotFound``."""
        await self._transactions.write(lambda db: responses.delete_response(db, response_id, tenant))

    async def ledger(self, session_id: str) -> array[int]:
        """All token ids of a session, as an ``array('i')``."""
        return await self._transactions.read(lambda db: ledger.ledger_span(db, session_id, None))

    async def ledger_span(self, session_id: str, span: Span) -> array[int]:
        """The token ids of ``span``; ``InvalidRequest`` if it leaves the ledger."""
        return await self._transactions.read(lambda db: ledger.ledger_span(db, session_id, span))

    async def items(self, session_id: str) -> list[ItemRecord]:
        """All items in order."""
        return await self._transactions.read(lambda db: ledger.items(db, session_id))

    async def turns(self, session_id: str) -> list[TurnRecord]:
        """All turns in order."""
        return await self._transactions.read(lambda db: ledger.turns(db, session_id))

    async def last_turn(self, session_id: str) -> TurnRecord | None:
        """The newest turn; ``None`` before the first."""
        return await self._transactions.read(lambda db: ledger.last_turn(db, session_id))

    async def longest_chain(self, tenant: str, chains: Sequence[str], cache_key: str | None = None) -> int:
        """How many of ``chains``, of ever longer beginnings of one conversation, lead to the last one that an item of
        the tenant's has; 0 where none does. ``cache_key``: in a session under it alone."""
        return await self._transactions.read(lambda db: nodes.longest_chain(db, tenant, chains, cache_key))

    async def nodes(self, tenant: str, chain: str, cache_key: str | None, limit: int) -> list[Node]:
        """Where a conversation with that chain can go on, the best places first: see ``nodes.nodes``."""
        return await self._transactions.read(lambda db: nodes.nodes(db, tenant, chain, cache_key, limit))

    async def named_session(self, tenant: str, name: str) -> SessionRecord | None:
        """The session that the tenant's clients call ``name``; ``None`` where there is none."""
        return await self._transactions.read(lambda db: nodes.named_session(db, tenant, name))

    async def latest_sessions(self, tenant: str, limit: int) -> list[SessionRecord]:
        """A tenant's sessions, those that were used last."""
        return await self._transactions.read(lambda db: nodes.latest(db, tenant, limit))

    async def oldest_anonymous(self, tenant: str, limit: int) -> list[str]:
        """Anonymous sessions of a tenant, the least recently used first."""
        return await self._transactions.read(lambda db: nodes.oldest_anonymous(db, tenant, limit))

    async def expired_sessions(self, before: float, most: int, limit: int = 100) -> list[tuple[str, str]]:
        """Tenant and id of anonymous sessions that were last used before unix second ``before``, or are more than
        ``most`` of one tenant; the oldest first."""
        return await self._transactions.read(lambda db: nodes.expired(db, before, most, limit))

    async def later_turns(self, limit: int) -> list[TurnRecord]:
        """Of all sessions, the newest turns that found known tokens: no session's first. Newest first."""
        return await self._transactions.read(lambda db: ledger.later_turns(db, limit))

    async def item_tokens(self) -> dict[str, int]:
        """Tokens of all sessions' items by kind, without system prompts."""
        return await self._transactions.read(ledger.item_tokens)

    async def append_segments(
        self,
        session_id: str,
        chunks: Sequence[ChunkRecord],
        segments: Sequence[SegmentRecord],
        resume_points: Sequence[ResumePoint] = (),
    ) -> None:
        """Continue the manifest: make rows for new chunks, count references, add resume points.

        A segment may name a chunk that has a row already and is not in ``chunks``. Resume points that exist are left.
        Raises ``ManifestConflict`` for segments that do not continue the manifest, overrun ledger or chunk, or name
        an unknown chunk; ``ChunkCondemned`` for a chunk that the sweep is deleting.
        """
        await self._transactions.write(
            lambda db: manifest.append_segments(db, session_id, chunks, segments, resume_points)
        )

    async def reseal(
        self,
        session_id: str,
        chunks: Sequence[ChunkRecord],
        segments: Sequence[SegmentRecord],
        resume_points: Sequence[ResumePoint] = (),
        void: Span | None = None,
    ) -> list[str]:
        """As ``append_segments``, where the first of ``segments``, in ledger order, may replace what is stored.

        Resume points inside ``void`` (open at both ends) that are not among ``resume_points`` go. Returns the chunks
        that lost their last reference.
        """
        return await self._transactions.write(
            lambda db: manifest.reseal(db, session_id, chunks, segments, resume_points, void)
        )

    async def attach(
        self, session_id: str, segments: Sequence[SegmentRecord], resume_points: Sequence[ResumePoint] = ()
    ) -> int:
        """Let a session without KV begin with chunks that are stored. Returns its ``kv_length``.

        Raises ``ManifestConflict`` where it has KV, ``ChunkCondemned`` where a chunk is being deleted.
        """
        return await self._transactions.write(lambda db: manifest.attach(db, session_id, segments, resume_points))

    async def stored_chunks(self, tenant: str, keys: Sequence[str]) -> list[ChunkRecord]:
        """Chunks of one tenant stored under any of these lookup keys; none that is being deleted."""
        return await self._transactions.read(lambda db: chunks.stored_chunks(db, tenant, keys))

    async def release_foreign(self, kv_fingerprint: str, tenant: str | None = None) -> list[str]:
        """Sessions with another model's KV give it up, the least recently used first; their ledgers stay.

        Those of one tenant, or of all.
        Ends with the first that frees something. Returns the chunks that lost their last reference.
        """
        return await self._transactions.write(lambda db: manifest.release_foreign(db, kv_fingerprint, tenant))

    async def adopt(
        self,
        session_id: str,
        chunks: Sequence[ChunkRecord],
        segments: Sequence[SegmentRecord],
        resume_points: Sequence[ResumePoint] = (),
    ) -> None:
        """Fill holes of a manifest, or continue it, with chunks that were found again; references are counted anew.

        Raises as ``append_segments`` does.
        """
        await self._transactions.write(lambda db: manifest.adopt(db, session_id, chunks, segments, resume_points))

    async def loose_chunks(self) -> list[str]:
        """Chunks with a row that no segment names, or another number of them than is counted."""
        return await self._transactions.read(chunks.loose_chunks)

    async def pointless_sessions(self) -> set[str]:
        """Sessions with stored KV whose last commit is no resume point."""
        return await self._transactions.read(manifest.pointless_sessions)

    async def recount(self) -> None:
        """Make references what the segments say, and drop segments whose chunk has no row."""
        await self._transactions.write(chunks.recount)

    async def manifest(self, session_id: str) -> Manifest:
        """The stored KV of a session."""
        return await self._transactions.read(lambda db: manifest.manifest(db, session_id))

    async def truncate_manifest(self, session_id: str, position: int) -> list[str]:
        """Drop or shorten segments so that none reaches beyond ``position``, and resume points beyond it.

        Returns the chunks that lost their last reference.
        """
        return await self._transactions.write(lambda db: manifest.truncate_manifest(db, session_id, position))

    async def prune_manifest(self, session_id: str, needed: Sequence[Span], point: int) -> list[str]:
        """Drop segments outside ``needed``, and the resume points before ``point`` that are not whole any more.

        Returns the chunks that lost their last reference.
        """
        return await self._transactions.write(lambda db: manifest.prune_manifest(db, session_id, needed, point))

    async def claim_garbage(self, limit: int = 100, spared: frozenset[str] = frozenset()) -> list[str]:
        """Up to ``limit`` chunks without references, now marked: their files may be deleted, nobody can attach. None of
        ``spared``.

        Where they leave room, chunks claimed earlier and never forgotten (a crash, a failed deletion) follow.
        """
        return await self._transactions.write(lambda db: chunks.claim_garbage(db, limit, spared))

    async def forget_chunks(self, ids: Iterable[str]) -> None:
        """Remove the rows of chunks whose files are gone, and leave tombstones.

        An id without a row (an orphan file) gets its tombstone too. ``ManifestConflict`` if a row was not claimed.
        """
        unique, at = list(ids), time.time()
        await self._transactions.write(lambda db: chunks.forget_chunks(db, unique, at))

    async def known_chunk_ids(self) -> set[str]:
        """Every chunk with a row, whatever its references."""
        return await self._transactions.read(chunks.known_chunk_ids)

    async def chunk_bytes(self) -> dict[str, int]:
        """Bytes of all chunk files with a row, by KV fingerprint."""
        return await self._transactions.read(chunks.chunk_bytes)

    async def tenant_bytes(self) -> dict[str, int]:
        """Bytes of the chunks that sessions need, by tenant."""
        return await self._transactions.read(chunks.tenant_bytes)

    async def chunk_facts(self) -> list[ChunkFacts]:
        """Every chunk with a row, in the order of their ids."""
        return await self._transactions.read(chunks.chunk_facts)

    async def tombstoned(self, ids: Iterable[str]) -> set[str]:
        """Those of ``ids`` that were deleted on purpose."""
        wanted = list(ids)
        return await self._transactions.read(lambda db: chunks.tombstoned(db, wanted))

    async def create_key(
        self,
        name: str,
        *,
        admin: bool = False,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        max_sessions: int | None = None,
        max_disk: int | None = None,
    ) -> tuple[KeyRecord, str]:
        """A new key and its secret, which nobody can be told again. ``max_disk`` in bytes.

        Raises ``InvalidRequest`` where a key that is not revoked has that name.
        """
        record, secret = keys.new_key(
            name,
            admin=admin,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            max_sessions=max_sessions,
            max_disk=max_disk,
        )
        await self._transactions.write(lambda db: keys.create_key(db, record, secret))
        return record, secret

    async def keys(self) -> list[KeyRecord]:
        """All keys, revoked ones included, oldest first."""
        return await self._transactions.read(keys.keys)

    async def find_key(self, secret: str) -> KeyRecord | None:
        """The key with that secret; ``None`` where there is none, or it is revoked."""
        return await self._transactions.read(lambda db: keys.find_key(db, secret))

    async def revoke_key(self, key: str) -> KeyRecord:
        """The key with that id or name is found no more. Its sessions stay. ``KeyNotFound`` if there is none."""
        return await self._transactions.write(lambda db: keys.revoke_key(db, key))

    async def key_used(self, key_id: str, at: float) -> None:
        """Note that it was used, at unix second ``at``."""
        await self._transactions.write(lambda db: keys.key_used(db, key_id, at))

    async def disk_use(self, tenant: str, but: Sequence[str] = ()) -> DiskUse | None:
        """What the tenant's sessions need on disk, without the chunks ``but``; ``None`` where nothing limits it."""
        names = list(but)
        return await self._transactions.read(lambda db: keys.disk_use(db, tenant, names))
