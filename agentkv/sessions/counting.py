"""How many tokens a request would put before its answer, without a session being made for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from agentkv.engine.templates import ChatTemplate
from agentkv.errors import InvalidRequest
from agentkv.schemas.messages import Message
from agentkv.sessions.heads import Head, behind_head
from agentkv.types import Span

if TYPE_CHECKING:
    from agentkv.sessions.continuing import Context
    from agentkv.sessions.manager import Sessions

__all__ = ["counted", "counted_behind"]

_TAIL = 512


async def counted(sessions: Sessions, head: Head, messages: Sequence[Message]) -> int:
    """Tokens of a whole conversation and of the opening of its answer. Raises as ``Sessions.create`` does."""
    return await asyncio.to_thread(_from_scratch, sessions, head, messages)


async def counted_behind(sessions: Sessions, context: Context, new: Sequence[Message]) -> int:
    """Tokens of what ``new`` comes behind, of ``new``, and of the opening of the answer."""
    record = context.session.record
    if not context.head.same(record):
        return await counted(sessions, context.head, [*context.messages, *new])
    said = behind_head(record, context.items)
    if not said:
        return await counted(sessions, context.head, new)
    end, last = context.items[-1].span.stop, context.items[-1]
    if last.kind == "tokens":
        raise InvalidRequest(f"session {record.id} holds raw tokens: nothing is rendered behind them", param="input")
    tail = list(await sessions.repository.ledger_span(record.id, Span(max(0, end - _TAIL), end)))
    before = Message.from_canonical(last.content)

    def added() -> int:
        turn = context.session._core.chat(sessions.shared.model.tokenizer).turn(
            new,
            tail,
            first=False,
            last_tool_calls=before.tool_calls if any(message.kind == "tool_result" for message in new) else None,
            after_generated=last.generated,
            generation_prompt=True,
            last_role=before.role,
        )
        return len(turn.ids)

    return end + await asyncio.to_thread(added)


def _from_scratch(sessions: Sessions, head: Head, messages: Sequence[Message]) -> int:
    tools = [dict(tool) for tool in head.tools] if head.tools else None
    template = ChatTemplate(sessions.shared.model.tokenizer, {}, tools, head.system, now=datetime.now(UTC))
    ids = template.head().ids
    turn = template.turn(messages, ids, first=True, after_generated=False, generation_prompt=True)
    return len(ids) + len(turn.ids)
