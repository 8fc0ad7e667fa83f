"""Where a history that a client holds leaves the one that is stored, and what it would cost to follow it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentkv.engine.loading import LoadedModel
from agentkv.errors import InvalidRequest
from agentkv.schemas.messages import Message, MessageInput, identities, normalise
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.records import ItemRecord
from agentkv.types import Span

if TYPE_CHECKING:
    from agentkv.sessions.tiers import Tiers

__all__ = ["Divergence", "Explanation", "explained"]

_TAIL = 512
_AROUND = 20
"""Characters shown of each side where two texts part."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first message that is not what the session holds: ``message`` counts the history's messages from 0.

    ``item`` and ``span``: what is stored there instead, and the ledger positions it occupies (``None`` behind the last
    item); ``position``: the ledger token from which on the two differ. ``reason`` says how.
    """

    message: int
    item: str | None
    span: Span | None
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """``matched`` messages of the history are the session's, ``matched_tokens`` of its ledger.

    ``diverges``: ``None`` where the history is the session's own, perhaps with new messages behind. To answer it,
    ``reused_tokens`` have their KV, and ``compute_tokens`` would be computed in about ``compute_seconds`` (``None``
    until this runtime has measured a prefill).
    """

    session_id: str
    matched: int
    matched_tokens: int
    diverges: Divergence | None
    reused_tokens: int
    compute_tokens: int
    compute_seconds: float | None


async def explained(
    core: SessionCore, messages: MessageInput, tools: Sequence[Any] | None, model: LoadedModel, tiers: Tiers
) -> Explanation:
    """See ``Session.explain``. Call with the gate held."""
    if model.tokenizer is None:
        raise InvalidRequest("this model has no tokenizer: its sessions hold tokens, not messages", param="messages")
    history = normalise(messages)
    items = await tiers.repository.items(core.id)
    opening = _opening(core, history, tools)
    said = history[1:] if history[0].role in ("system", "developer") else history
    shift = len(history) - len(said)
    stored = [item for item in items if item.span.stop > core.record.pinned]
    same, diverges = (0, opening) if opening else _compared(said, stored, shift, core.record.ledger_length)
    if opening:
        compute = len(await asyncio.to_thread(_from_scratch, core, history, tools, model))
        reused = 0
    else:
        place = await tiers.branching.place(core, items, len(items) - len(stored) + same)
        place.close()
        reused = place.cut.kv_length if place.cut.placement is None else place.cut.placement.tokens
        ledger = (await core.load(tiers.repository))[: place.cut.position]
        added = await asyncio.to_thread(_added, core, ledger, stored[:same], said[same:], model)
        compute = place.cut.position - place.cut.kv_length + added
    return Explanation(
        session_id=core.id,
        matched=0 if opening else shift + same,
        matched_tokens=0 if opening else (stored[same - 1].span.stop if same else core.record.pinned),
        diverges=diverges,
        reused_tokens=reused,
        compute_tokens=compute,
        compute_seconds=tiers.residency.rates.estimate("disk", compute).recompute,
    )


def _opening(core: SessionCore, history: Sequence[Message], tools: Sequence[Any] | None) -> Divergence | None:
    """Whether system prompt and tools, which are frozen with a session, are others."""
    record = core.record
    first = history[0]
    system = first.text if first.role in ("system", "developer") else None
    span = Span(0, record.pinned)
    if system is not None and (record.system or "").strip() != system.strip():
        reason = f"another system prompt: {_parting(record.system or '', system)}"
        return Divergence(0, None, span, 0, reason)
    if tools is not None and list(tools) != (record.tools or []):
        names = [[tool.get("function", tool).get("name") for tool in side] for side in (record.tools or [], tools)]
        how = f"{names[0]} are stored, {names[1]} are given" if names[0] != names[1] else "their definitions changed"
        return Divergence(0, None, span, 0, f"other tools: {how}")
    return None


def _compared(
    said: Sequence[Message], stored: Sequence[ItemRecord], shift: int, end: int
) -> tuple[int, Divergence | None]:
    """How many messages are the same, and what is with the first that is not."""
    for index, item in enumerate(stored):
        if item.kind == "tokens":
            return index, Divergence(index + shift, item.id, item.span, item.span.start, "raw tokens are stored here")
    ours = identities([Message.from_canonical(item.content) for item in stored])
    for index, (mine, theirs) in enumerate(zip(ours, identities(said), strict=False)):
        if mine != theirs:
            item = stored[index]
            return index, Divergence(index + shift, item.id, item.span, item.span.start, _difference(mine, theirs))
    if len(said) < len(stored):
        item = stored[len(said)]
        more = len(stored) - len(said)
        reason = f"the history ends here, the session goes on with {more} more item{'s' if more > 1 else ''}"
        return len(said), Divergence(len(said) + shift, item.id, item.span, item.span.start, reason)
    return len(stored), None


def _difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    if mine["role"] != theirs["role"]:
        return f"role {mine['role']!r} is stored, {theirs['role']!r} is given"
    if mine["text"] != theirs["text"]:
        return f"another text: {_parting(mine['text'], theirs['text'])}"
    if mine.get("calls") != theirs.get("calls"):
        names = [[name for name, _ in side.get("calls", [])] for side in (mine, theirs)]
        return "other tool calls: " + (
            f"{names[0]} are stored, {names[1]} are given" if names[0] != names[1] else "their arguments differ"
        )
    return "a tool result that answers another call"


def _parting(mine: str, theirs: str) -> str:
    mine, theirs = mine.strip(), theirs.strip()
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    ours, others = (text[at : at + _AROUND] for text in (mine, theirs))
    return f"at character {at}, {ours!r} is stored, {others!r} is given"


def _added(
    core: SessionCore, ledger: Sequence[int], kept: Sequence[ItemRecord], new: Sequence[Message], model: LoadedModel
) -> int:
    """Tokens that the new messages and the opening of an answer add behind those items. Blocking."""
    last = kept[-1] if kept else None
    if last is not None and last.role == "assistant" and not new:
        return 0  # the session has answered already
    message = None if last is None else Message.from_canonical(last.content)
    calls = message.tool_calls if message is not None and any(m.kind == "tool_result" for m in new) else None
    rendered = core.chat(model.tokenizer).turn(
        new,
        ledger[-_TAIL:],
        first=last is None,
        last_tool_calls=calls,
        after_generated=last is not None and last.generated,
        generation_prompt=True,
        last_role=None if message is None else message.template_role,  # type: ignore[arg-type]
    )
    return len(rendered.ids)


def _from_scratch(
    core: SessionCore, history: Sequence[Message], tools: Sequence[Any] | None, model: LoadedModel
) -> list[int]:
    """The whole history, as a new session would hold it. Blocking."""
    from datetime import UTC, datetime

    from agentkv.engine.templates import ChatTemplate

    record = core.record
    told = history[0].text if history[0].role in ("system", "developer") else record.system
    said = history[1:] if history[0].role in ("system", "developer") else history
    given = record.tools if tools is None else [dict(tool) for tool in tools]
    template = ChatTemplate(model.tokenizer, record.template_args, given or None, told, now=datetime.now(UTC))
    head = template.head().ids
    if not said:
        return head
    return head + template.turn(said, head, first=True, after_generated=False, generation_prompt=True).ids
