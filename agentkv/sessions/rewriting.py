"""A conversation that is said anew: another head, or without one of its items, under the same id.

What is frozen with a session (system prompt, tools) and what was said (items) changes here only: all of it is rendered
again in one transaction, items keep their ids, and the next turn computes its KV.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agentkv.errors import ContextTooLong, InvalidRequest
from agentkv.policies.retention import check_fits, parse_policy
from agentkv.schemas.messages import Message
from agentkv.sessions import accepting
from agentkv.sessions.chains import chained
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.records import Cut, ItemRecord, SessionRecord, TurnRecord
from agentkv.types import SessionState, Span

if TYPE_CHECKING:
    from agentkv.sessions.manager import Sessions
    from agentkv.sessions.session import Session

__all__ = ["Head", "behind_head", "rewritten"]


@dataclass(frozen=True, slots=True)
class Head:
    """What a conversation begins with. ``instructions``: the beginning of ``system`` that responses replace."""

    system: str | None
    tools: tuple[Mapping[str, Any], ...] | None
    instructions: str | None = None

    @classmethod
    def of(cls, record: SessionRecord) -> Head:
        """A session's."""
        return cls(record.system, tuple(record.tools) if record.tools else None, record.instructions)

    def same(self, record: SessionRecord) -> bool:
        """Whether a session has it already."""
        systems = [None if text is None else text.strip() for text in (self.system, record.system)]
        return systems[0] == systems[1] and list(self.tools or ()) == list(record.tools or ())


def behind_head(record: SessionRecord, items: Sequence[ItemRecord]) -> list[ItemRecord]:
    """What was said behind the head."""
    return [item for item in items if not (record.pinned and item.turn == 0)]


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
        limit = model.context_limit
        if len(ids) >= limit:
            raise ContextTooLong(
                tokens=len(ids) + 1, limit=limit, advice="system prompt and tools alone exceed it; shorten them"
            )
        check_fits(parse_policy(fresh.policy), Span(0, len(ids)), limit)
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
