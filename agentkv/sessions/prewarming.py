"""A head that many sessions will begin with, computed and stored before the first of them comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentkv.engine.loading import LoadedModel
from agentkv.sessions.core import SessionCore
from agentkv.sessions.leading import lead
from agentkv.sessions.relief import relieved
from agentkv.types import SessionState, Tier

if TYPE_CHECKING:
    from agentkv.sessions.manager import Sessions
    from agentkv.sessions.session import Session

__all__ = ["AGENT", "prewarmed"]

AGENT = "agentkv-prewarm"
"""The agent that sessions belong to which hold a head for others."""
_PAGE = 100


async def prewarmed(
    sessions: Sessions,
    model: LoadedModel,
    system: str | None,
    tools: Sequence[Mapping[str, Any]] | None,
    template_args: Mapping[str, Any] | None,
    idle_codec: str | None,
) -> Session:
    """See ``Sessions.prewarm``."""
    async with sessions.shared.choosing_holder:
        session = await sessions.create(
            system, tools=tools, template_args=template_args, idle_codec=idle_codec, agent_id=AGENT, policy="full"
        )
        try:
            known = await _same(sessions, session)
        except BaseException:
            await session.delete()
            raise
        if known is not None:
            await session.delete()
            session = known
    try:
        await _computed(session._core, sessions, model)
    except BaseException:
        if known is None and not session._core.record.kv_length:
            await session.delete()
        raise
    return session


async def _same(sessions: Sessions, session: Session) -> Session | None:
    """A session that holds the same head already."""
    mine = await session.token_ids()
    before = None
    while page := await sessions.list(agent_id=AGENT, limit=_PAGE, before=before):
        for record in page:
            alike = (record.kv_fingerprint, record.idle_codec) == (
                session._core.record.kv_fingerprint,
                session._core.record.idle_codec,
            )
            if alike and record.id != session.id and record.ledger_length == len(mine):
                other = await sessions.get(record.id)
                if await other.token_ids() == mine:
                    return other
        before = page[-1].id
    return None


async def _computed(core: SessionCore, sessions: Sessions, model: LoadedModel) -> None:
    """Its head is stored from here on, computed now where nobody else has stored it. Then it rests on disk."""
    tiers = sessions.tiers
    async with core.gate:
        core.check_open()
        ledger = await core.load(tiers.repository)
        async with tiers.attaching.attached(core, ledger) as leading:
            if leading is not None:
                pinned = core.record.pinned

                async def attempt() -> None:
                    await tiers.residency.reserve(core, pinned)
                    if core.kv is None:
                        core.kv, core.state = tiers.open(core, pinned), SessionState.LIVE
                    await lead(core, core.kv, ledger, model, tiers, leading)

                try:
                    await relieved(core, tiers, sessions.engine, pinned, attempt)
                finally:
                    tiers.residency.settle(core)
    if core.kv is not None:
        await tiers.suspend(core, Tier.DISK)
