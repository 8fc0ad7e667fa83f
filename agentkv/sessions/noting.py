"""Messages that are committed and computed later: by the turn that answers them, if one ever does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from agentkv.errors import InvalidRequest
from agentkv.schemas.messages import Message
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.records import ItemRecord, TurnRecord
from agentkv.sessions.entering import TurnInput, item_records, rendered
from agentkv.types import Span

if TYPE_CHECKING:
    from agentkv.sessions.manager import Sessions
    from agentkv.sessions.session import Session

__all__ = ["noted"]


async def noted(sessions: Sessions, session: Session, messages: Sequence[Message]) -> list[ItemRecord]:
    """Commit ``messages`` as given, assistant messages included; nothing is computed now. Their items.

    Raises ``SessionBusy`` during a turn, ``InvalidRequest`` for what the template refuses. Cancellation waits for it.
    """
    if not messages:
        raise InvalidRequest("items: there is nothing to add", param="items")
    return await asyncio.shield(sessions.tracked(_note(sessions, session._core, tuple(messages))))


async def _note(sessions: Sessions, core: SessionCore, messages: tuple[Message, ...]) -> list[ItemRecord]:
    shared = sessions.shared
    async with core.turn(None):
        request = TurnInput("append", messages)
        await core.load(sessions.repository)
        entered = await asyncio.to_thread(rendered, core, shared.model, request, shared.settings.tool_format)
        items, ids = item_records(core, request, entered, Message(role="assistant", content=""), 0), entered.ids
        assert core.ledger is not None
        record, start = core.record, core.record.ledger_length
        added = TurnRecord(
            record.turns, Span(start, start + len(ids)), "append", None, len(ids), 0, 0, None, None, time.time()
        )
        await sessions.repository.commit_turn(
            core.id,
            added,
            items,
            ids,
            expect_length=start,
            kv_length=record.kv_length,
            placement=record.placement,
        )
        core.ledger.extend(ids)
        core.note_items(items)
        core.last_finish = None
        core.record = replace(
            record, ledger_length=start + len(ids), turns=record.turns + 1, updated_at=added.created_at
        )
        return items
