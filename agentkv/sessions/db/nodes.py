"""Where conversations are found that clients hold no id of: plain functions of a SQLAlchemy session."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import and_, case, func, select
from sqlalchemy.orm import Session

from agentkv.sessions.db.ledger import item_record, session_record
from agentkv.sessions.db.records import Node, SessionRecord
from agentkv.sessions.db.schema import ItemRow, SessionRow

__all__ = ["expired", "latest", "longest_chain", "named_session", "nodes", "oldest_anonymous"]

_BATCH = 256
"""Chains looked up at once; SQLite and PostgreSQL limit the parameters of one statement."""


def longest_chain(db: Session, tenant: str, chains: Sequence[str], cache_key: str | None) -> int:
    """How many of ``chains``, of ever longer beginnings of one conversation, there are up to the last known; or 0.
    ``cache_key``: in a session under it; ``None``: in any."""
    mine = () if cache_key is None else (SessionRow.cache_key == cache_key,)
    for stop in range(len(chains), 0, -_BATCH):
        batch = chains[max(0, stop - _BATCH) : stop]
        query = (
            select(ItemRow.chain)
            .join(SessionRow, SessionRow.id == ItemRow.session_id)
            .where(ItemRow.chain.in_(batch), SessionRow.tenant == tenant, *mine)
            .distinct()
        )
        known = set(db.scalars(query))
        for index in range(len(batch), 0, -1):
            if batch[index - 1] in known:
                return stop - len(batch) + index
    return 0


def nodes(db: Session, tenant: str, chain: str, cache_key: str | None, limit: int) -> list[Node]:
    """Places behind ``chain``: the ends of anonymous sessions under that key first, then what is on the device, of
    each the latest used."""
    mine = SessionRow.cache_key.is_(None) if cache_key is None else SessionRow.cache_key == cache_key
    end = and_(SessionRow.anonymous, mine, SessionRow.ledger_length == ItemRow.stop)
    query = (
        select(SessionRow, ItemRow)
        .join(ItemRow, SessionRow.id == ItemRow.session_id)
        .where(ItemRow.chain == chain, SessionRow.tenant == tenant)
        .order_by(case((end, 0), (SessionRow.state == "live", 1), else_=2), SessionRow.updated_at.desc(), SessionRow.id)
        .limit(limit)
    )
    return [Node(session_record(session), item_record(item)) for session, item in db.execute(query)]


def named_session(db: Session, tenant: str, name: str) -> SessionRecord | None:
    """The session that the tenant's clients call ``name``."""
    row = db.scalar(select(SessionRow).where(SessionRow.tenant == tenant, SessionRow.name == name))
    return None if row is None else session_record(row)


def latest(db: Session, tenant: str, limit: int) -> list[SessionRecord]:
    """The tenant's sessions that were used last."""
    query = select(SessionRow).where(SessionRow.tenant == tenant).order_by(SessionRow.updated_at.desc()).limit(limit)
    return [session_record(row) for row in db.scalars(query)]


def oldest_anonymous(db: Session, tenant: str, limit: int) -> list[str]:
    """Anonymous sessions of the tenant, the least recently used first."""
    query = select(SessionRow.id).where(SessionRow.anonymous, SessionRow.tenant == tenant)
    return list(db.scalars(query.order_by(SessionRow.updated_at).limit(limit)))


def expired(db: Session, before: float, most: int, limit: int) -> list[tuple[str, str]]:
    """Tenant and id of anonymous sessions last used before unix second ``before``, or beyond the tenant's newest
    ``most``; the oldest first."""
    idle = select(SessionRow.tenant, SessionRow.id).where(SessionRow.anonymous, SessionRow.updated_at < before)
    found = [(tenant, name) for tenant, name in db.execute(idle.order_by(SessionRow.updated_at).limit(limit))]
    counts = select(SessionRow.tenant, func.count()).where(SessionRow.anonymous, SessionRow.updated_at >= before)
    for tenant, count in db.execute(counts.group_by(SessionRow.tenant).having(func.count() > most)):
        oldest = (
            select(SessionRow.id)
            .where(SessionRow.anonymous, SessionRow.tenant == tenant, SessionRow.updated_at >= before)
            .order_by(SessionRow.updated_at)
            .limit(min(count - most, limit))
        )
        found += [(tenant, name) for name in db.scalars(oldest)]
    return found[:limit]
