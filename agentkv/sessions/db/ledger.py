"""Sessions and their ledgers: plain functions of a SQLAlchemy session, each the body of one transaction."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Sequence
from itertools import islice
from typing import Any, get_args

from sqlalchemy import func, insert, select, tuple_, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from agentkv.errors import InvalidRequest, SessionNotFound, StorageError
from agentkv.sessions.db.keys import check_sessions
from agentkv.sessions.db.records import (
    ItemRecord,
    LedgerConflict,
    SessionRecord,
    StoredState,
    TurnRecord,
    pack_placement,
    unpack_placement,
)
from agentkv.sessions.db.schema import ItemRow, LedgerRow, SessionRow, TurnRow
from agentkv.types import Placement, Span

__all__ = [
    "commit_turn",
    "count_sessions",
    "create_session",
    "get_session",
    "insert_session",
    "item_record",
    "item_tokens",
    "item_values",
    "items",
    "last_turn",
    "later_turns",
    "ledger_span",
    "list_sessions",
    "pack_ids",
    "reset_states",
    "session_record",
    "session_row",
    "turn_values",
    "turns",
    "update_session",
]

_TOUCHING = frozenset(
    {"agent_id", "metadata", "idle_codec", "model", "kv_fingerprint", "session_fingerprint", "policy"}
)
_QUIET = frozenset({"state", "kv_length", "pinned", "policy_since", "anonymous"})


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    try:
        packed = array("i", ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest(f"a token id is not a 32-bit integer: {error}", param="ids") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack_ids(packed: bytes) -> array[int]:
    ids = array("i")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def session_row(db: Session, session_id: str, *, tenant: str | None = None, lock: bool = False) -> SessionRow:
    """The row, locked against other writers if asked; ``SessionNotFound`` if missing or another tenant's."""
    row = db.get(SessionRow, session_id, with_for_update=lock or None)
    if row is None or (tenant is not None and row.tenant != tenant):
        raise SessionNotFound(session_id)
    return row


def create_session(
    db: Session, record: SessionRecord, items: Sequence[ItemRecord], ids: bytes, turn: TurnRecord | None
) -> None:
    """A new session with what its head turn put into the ledger (``ids`` packed)."""
    length = len(ids) // 4
    if record.ledger_length != length or record.turns != (0 if turn is None else 1):
        raise InvalidRequest(
            f"session {record.id} claims {record.ledger_length} tokens and {record.turns} turns, "
            f"and comes with {length} and {0 if turn is None else 1}",
            param="record",
        )
    _check_lengths(record.id, kv_length=record.kv_length, pinned=record.pinned, ledger_length=length)
    insert_session(db, record)
    _append(db, record.id, Span(0, length), items, ids, turn)


def insert_session(db: Session, record: SessionRecord) -> SessionRow:
    """The row alone. ``InvalidRequest`` where the id is taken, ``LimitExceeded`` where its tenant has too many."""
    _check_state(record.state)
    check_sessions(db, record.tenant)
    try:
        db.execute(insert(SessionRow).values(**_session_values(record)))
    except IntegrityError as error:
        raise InvalidRequest(f"session {record.id} exists already", param="id") from error
    return session_row(db, record.id)


def get_session(db: Session, session_id: str, tenant: str) -> SessionRecord:
    """``SessionNotFound`` for one that is missing or another tenant's."""
    return session_record(session_row(db, session_id, tenant=tenant))


def list_sessions(
    db: Session, tenant: str | None, agent_id: str | None, limit: int, before: str | None
) -> list[SessionRecord]:
    """One tenant's, or all; newest first; ``before`` is the id of the last session of the page before."""
    query = select(SessionRow)
    if tenant is not None:
        query = query.where(SessionRow.tenant == tenant)
    if agent_id is not None:
        query = query.where(SessionRow.agent_id == agent_id)
    if before is not None:
        mark = session_row(db, before, tenant=tenant)
        query = query.where(tuple_(SessionRow.created_at, SessionRow.id) < (mark.created_at, mark.id))
    query = query.order_by(SessionRow.created_at.desc(), SessionRow.id.desc()).limit(limit)
    return [session_record(row) for row in db.scalars(query)]


def count_sessions(db: Session, tenant: str | None) -> int:
    """Sessions of one tenant, or of all."""
    query = select(func.count()).select_from(SessionRow)
    return db.scalar(query if tenant is None else query.where(SessionRow.tenant == tenant)) or 0


def update_session(db: Session, session_id: str, tenant: str, fields: dict[str, Any]) -> SessionRecord:
    """Set fields that may change between turns; ``updated_at`` follows what a user would call a change."""
    unknown = fields.keys() - _TOUCHING - _QUIET
    if unknown:
        raise InvalidRequest(
            f"{', '.join(sorted(unknown))} of a session cannot be updated; these can: "
            f"{', '.join(sorted(_TOUCHING | _QUIET))}",
            param=min(unknown),
        )
    if "state" in fields:
        _check_state(fields["state"])
    row = session_row(db, session_id, tenant=tenant, lock=True)
    for name, value in fields.items():
        setattr(row, "user_metadata" if name == "metadata" else name, value)
    _check_lengths(row.id, kv_length=row.kv_length, pinned=row.pinned, ledger_length=row.ledger_length)
    if fields.keys() & _TOUCHING:
        row.updated_at = max(row.updated_at, time.time())
    return session_record(row)


def reset_states(db: Session) -> int:
    """At start-up nothing is in memory: every session that had KV is on disk. Returns how many changed."""
    changed = update(SessionRow).where(SessionRow.state.not_in(("new", "disk"))).values(state="disk")
    return db.connection().execute(changed).rowcount


def commit_turn(
    db: Session,
    session_id: str,
    turn: TurnRecord,
    items: Sequence[ItemRecord],
    ids: bytes,
    *,
    expect_length: int,
    kv_length: int,
    pinned: int | None,
    state: StoredState | None,
    placement: Placement | None,
    policy: str | None,
    policy_since: int,
) -> None:
    """Append one turn: ledger segment, items, turn, counters (``ids`` packed). ``LedgerConflict`` if overtaken."""
    row = session_row(db, session_id, lock=True)
    if row.ledger_length != expect_length or row.turns != turn.seq:
        raise LedgerConflict(
            f"session {session_id} holds {row.ledger_length} tokens in {row.turns} turns where this turn expected "
            f"{expect_length} in {turn.seq}: another writer was faster. Reload the session and send again"
        )
    span = Span(expect_length, expect_length + len(ids) // 4)
    pinned = row.pinned if pinned is None else pinned
    _check_lengths(session_id, kv_length=kv_length, pinned=pinned, ledger_length=span.stop)
    _append(db, session_id, span, items, ids, turn)
    row.ledger_length, row.kv_length, row.pinned = span.stop, kv_length, pinned
    row.placement = pack_placement(placement)
    row.turns += 1
    if policy is not None:
        row.policy, row.policy_since = policy, policy_since
    row.updated_at = max(row.updated_at, turn.created_at)
    if state is not None:
        _check_state(state)
        row.state = state


def ledger_span(db: Session, session_id: str, span: Span | None) -> array[int]:
    """Token ids of a span, or of all. ``StorageError`` if the rows do not add up: the ledger is never guessed."""
    session = session_row(db, session_id)
    wanted = Span(0, session.ledger_length) if span is None else span
    if not 0 <= wanted.start <= wanted.stop <= session.ledger_length:
        raise InvalidRequest(
            f"span [{wanted.start}, {wanted.stop}) is outside the {session.ledger_length} tokens of the ledger",
            param="span",
        )
    ids = array("i")
    if len(wanted) == 0:
        return ids
    rows = db.execute(
        select(LedgerRow.start, LedgerRow.stop, LedgerRow.ids)
        .where(LedgerRow.session_id == session_id, LedgerRow.start < wanted.stop, LedgerRow.stop > wanted.start)
        .order_by(LedgerRow.start)
    )
    end: int | None = None
    first = wanted.start
    for start, stop, packed in rows:
        if len(packed) != 4 * (stop - start) or (end is not None and start != end):
            raise StorageError(f"the ledger of {session_id} is damaged at token {start}; restore the database")
        first = start if end is None else first
        end = stop
        ids += _unpack_ids(packed)
    if first > wanted.start or end is None or end < wanted.stop:
        raise StorageError(f"the ledger of {session_id} lacks part of [{wanted.start}, {wanted.stop})")
    return ids[wanted.start - first : wanted.stop - first]


def items(db: Session, session_id: str) -> list[ItemRecord]:
    """All items in order."""
    session_row(db, session_id)
    rows = db.scalars(select(ItemRow).where(ItemRow.session_id == session_id).order_by(ItemRow.seq))
    return [item_record(row) for row in rows]


def turns(db: Session, session_id: str) -> list[TurnRecord]:
    """All turns in order."""
    session_row(db, session_id)
    rows = db.scalars(select(TurnRow).where(TurnRow.session_id == session_id).order_by(TurnRow.seq))
    return [_turn_record(row) for row in rows]


def last_turn(db: Session, session_id: str) -> TurnRecord | None:
    """The newest turn, if there is one."""
    session_row(db, session_id)
    query = select(TurnRow).where(TurnRow.session_id == session_id).order_by(TurnRow.seq.desc()).limit(1)
    row = db.scalar(query)
    return None if row is None else _turn_record(row)


def later_turns(db: Session, limit: int) -> list[TurnRecord]:
    """The newest turns that found known tokens, of all sessions; a fork's are its own."""
    query = (
        select(TurnRow)
        .join(SessionRow, SessionRow.id == TurnRow.session_id)
        .where(TurnRow.kind != "head", TurnRow.start >= func.coalesce(SessionRow.forked_at, 0))
        .order_by(TurnRow.created_at.desc(), TurnRow.session_id, TurnRow.seq.desc())
        .execution_options(yield_per=max(1, limit))
    )
    found = (turn for turn in map(_turn_record, db.scalars(query)) if turn.known_tokens)
    return list(islice(found, limit))


def item_tokens(db: Session) -> dict[str, int]:
    """Tokens of all sessions' items by kind, without system prompts."""
    tokens = func.sum(ItemRow.stop - ItemRow.start)
    rows = db.execute(select(ItemRow.kind, tokens).where(ItemRow.role != "system").group_by(ItemRow.kind))
    return {kind: int(total) for kind, total in rows}


def _append(
    db: Session, session_id: str, span: Span, items: Sequence[ItemRecord], ids: bytes, turn: TurnRecord | None
) -> None:
    if turn is not None and turn.span != span:
        raise InvalidRequest(
            f"turn {turn.seq} of {session_id} claims [{turn.span.start}, {turn.span.stop}), "
            f"its ids fill [{span.start}, {span.stop})",
            param="turn",
        )
    for item in items:
        if not span.start <= item.span.start <= item.span.stop <= span.stop:
            raise InvalidRequest(
                f"item {item.id} claims [{item.span.start}, {item.span.stop}), outside its turn's "
                f"[{span.start}, {span.stop})",
                param="items",
            )
    if turn is not None and turn.seed is not None and not -(2**63) <= turn.seed < 2**63:
        raise InvalidRequest(f"seed {turn.seed} does not fit 64 bits with sign", param="seed")
    try:
        if ids:
            db.execute(insert(LedgerRow).values(session_id=session_id, start=span.start, stop=span.stop, ids=ids))
        if items:
            db.execute(insert(ItemRow), [item_values(session_id, item) for item in items])
        if turn is not None:
            db.execute(insert(TurnRow).values(session_id=session_id, **turn_values(turn)))
    except IntegrityError as error:
        raise LedgerConflict(
            f"session {session_id} already has an item, turn or ledger segment of this turn ({error.orig}); "
            f"reload the session and send again"
        ) from error


def _check_lengths(session_id: str, *, kv_length: int, pinned: int, ledger_length: int) -> None:
    for name, value in (("kv_length", kv_length), ("pinned", pinned)):
        if not 0 <= value <= ledger_length:
            raise InvalidRequest(
                f"{name} {value} of {session_id} lies outside its ledger of {ledger_length} tokens", param=name
            )


def _check_state(state: str) -> None:
    if state not in get_args(StoredState):
        raise InvalidRequest(
            f"state {state!r} is not stored; these are: {', '.join(get_args(StoredState))}", param="state"
        )


def _session_values(record: SessionRecord) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in record.__dataclass_fields__}
    values["user_metadata"] = values.pop("metadata")
    values["placement"] = pack_placement(record.placement)
    return values


def session_record(row: SessionRow) -> SessionRecord:
    """A session's record."""
    values = {name: getattr(row, name) for name in SessionRecord.__dataclass_fields__ if name != "metadata"}
    values["placement"] = unpack_placement(row.placement)
    return SessionRecord(**values, metadata=row.user_metadata)


def item_values(session_id: str, item: ItemRecord) -> dict[str, Any]:
    """An item's columns."""
    return {
        "session_id": session_id,
        "seq": item.seq,
        "id": item.id,
        "turn": item.turn,
        "role": item.role,
        "kind": item.kind,
        "content": item.content,
        "start": item.span.start,
        "stop": item.span.stop,
        "generated": item.generated,
        "chain": item.chain,
    }


def item_record(row: ItemRow) -> ItemRecord:
    """An item's record."""
    r = row
    span = Span(r.start, r.stop)
    return ItemRecord(r.id, r.seq, r.turn, r.role, r.kind, r.content, span, r.generated, r.chain)  # type: ignore[arg-type]


def turn_values(turn: TurnRecord) -> dict[str, Any]:
    """A turn's columns, but for its session."""
    values = {name: getattr(turn, name) for name in turn.__dataclass_fields__ if name != "span"}
    return values | {"start": turn.span.start, "stop": turn.span.stop}


def _turn_record(row: TurnRow) -> TurnRecord:
    values = {name: getattr(row, name) for name in TurnRecord.__dataclass_fields__ if name != "span"}
    return TurnRecord(**values, span=Span(row.start, row.stop))
