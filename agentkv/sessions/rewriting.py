"""A conversation that is said anew: another head, or without one of its items, under the same id.

What is frozen with a session (system prompt, tools) and what was said (items) changes here only: all of it is rendered
again in one transaction, items keep their ids, and the next turn computes its KV.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from agentkv.errors import InvalidRequest
from agentkv.policies.retention import parse_policy
from agentkv.schemas.messages import Message
from agentkv.sessions import accepting
from agentkv.sessions.chains import chained
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.records import Cut, ItemRecord, TurnRecord
from agentkv.sessions.heads import Head, behind_head
from agentkv.types import SessionState, Span

if TYPE_CHECKING:
    from agentkv.sessions.manager import Sessions
    from agentkv.sessions.session import Session

__all__ = ["rewritten"]


async def rewritten(
    sessions: Sessions,
    session: Session,
    head: Head,
    said: Callable[[ItemRecord], Message | None] = lambda item: Message.from_canonical(item.content),
) -> None:
    """``session`` begins with ``head`` from now on, and its items are what ``said`` makes of them (``None``: it goes).

    Raises ``SessionBusy`` during a turn, ``InvalidRequest`` for raw tokens and for what template or model cannot
    honour, ``ContextTooLong`` for a head that is; nothing has changed then. Cancellation waits for it.
    """
    await asyncio.shield(sessions.tracked(_rewrite(sessions, session._core, head, said)))


async def _rewrite(
    sessions: Sessions, core: SessionCore, head: Head, said: Callable[[ItemRecord], Message | None]
) -> None:
    tiers, model, settings = sessions.tiers, sessions.shared.model, sessions.shared.settings
    async with core.turn(None):
        old = core.record
        stored = behind_head(old, await sessions.repository.items(core.id))
        if any(item.kind == "tokens" for item in stored):
            raise InvalidRequest(f"session {core.id} holds raw tokens, which cannot be said anew", param="conversation")
        kept = [(item, message) for item in stored if (message := said(item)) is not None]
        now = time.time()
        fresh = replace(
            old,
            system=head.system,
            tools=[dict(tool) for tool in head.tools] if head.tools else None,
            instructions=head.instructions,
            clock=old.created_at if old.clock is None else old.clock,
            kv_length=0,
            placement=None,
            policy_since=0,
            updated_at=now,
            state="new",
        )
        other = SessionCore(fresh, SessionState.NEW)
        template, ids = await asyncio.to_thread(accepting.head_of, other, model, settings.tool_format)
        accepting.check_head(parse_policy(fresh.policy), ids, model)
        items, first = accepting.head_records(head.system, ids, now)
        turns = [] if first is None else [first]
        ids = list(ids)
        if kept:
            assert template is not None
            messages = [message for _, message in kept]
            turn = await asyncio.to_thread(
                lambda: template.turn(messages, ids, first=True, after_generated=False, generation_prompt=False)
            )
            start = len(ids)
            for (item, message), (_, span) in zip(kept, turn.items, strict=True):
                items.append(
                    replace(
                        item,
                        seq=len(items),
                        turn=len(turns),
                        kind=message.kind,
                        content=message.canonical(),
                        span=Span(start + span.start, start + span.stop),
                        generated=False,
                    )
                )
            ids += turn.ids
            turns.append(
                TurnRecord(len(turns), Span(start, len(ids)), "append", None, len(turn.ids), 0, 0, None, None, now)
            )
        pinned = 0 if first is None else first.span.stop
        fresh = replace(fresh, pinned=pinned, ledger_length=len(ids), turns=len(turns))
        items = chained(fresh, items)
        await tiers.branching.written(core)
        dropped = await sessions.repository.rewrite_session(fresh, items, ids, turns, old.ledger_length)
        tiers.branching.become(core, Cut(len(ids), len(ids), len(items), len(turns), 0), None)
        core.record, core.template, core.tools_used = fresh, template, None
        if dropped:
            await tiers.writer.try_collecting(core.id)
