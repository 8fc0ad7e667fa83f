"""What enters a session by a turn: as tokens, as items, and as its policy sees it beforehand."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentkv.engine.loading import LoadedModel
from agentkv.engine.retention import Retention
from agentkv.errors import InvalidRequest
from agentkv.policies.retention import ItemView
from agentkv.schemas.messages import Message
from agentkv.schemas.replies import Item
from agentkv.schemas.sampling import SamplingParams
from agentkv.sessions.calling import Calling, check_results, prepared
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.records import ItemRecord
from agentkv.types import Span

__all__ = [
    "TAIL_TOKENS",
    "Rendered",
    "TurnInput",
    "item_records",
    "items_ahead",
    "public_item",
    "rendered",
    "retention_ahead",
]

TAIL_TOKENS = 512
"""Ids at the end of the ledger that rendering and detokenising look at."""


@dataclass(frozen=True, slots=True)
class TurnInput:
    """What a turn adds before it generates: messages, or raw ``ids``; and whether it generates at all."""

    kind: Literal["send", "append", "continue"]
    messages: tuple[Message, ...] = ()
    ids: tuple[int, ...] | None = None
    sampling: SamplingParams | None = None
    """``None``: commit the input, generate nothing."""
    again: bool = False
    """The answer takes the place of the session's last one."""
    behind: int | None = None
    """Length of the ledger that it goes on from. ``SessionBusy`` where another turn was faster; ``None``: any."""
    answer_id: str | None = None
    """Of the answer's item; ``None``: a new one."""

    @property
    def raw(self) -> bool:
        """A token-level turn: no template, no text."""
        return self.ids is not None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A turn's input as tokens: ``spans[i]`` is input item ``i``; ``prompt``: the generation prompt. In the ledger.

    ``calling``: how the reply is read, where not all of it is text.
    """

    ids: list[int]
    spans: list[Span]
    prompt: Span
    calling: Calling | None = None


def rendered(core: SessionCore, model: LoadedModel, request: TurnInput, tool_format: str) -> Rendered:
    """The turn's input. Call with the ledger loaded. Blocking: tokenising long texts takes a while."""
    start = core.record.ledger_length
    if request.ids is not None:
        vocabulary = model.adapter.vocab_size
        wrong = next((i for i in request.ids if not 0 <= i < vocabulary), None)
        if wrong is not None:
            raise InvalidRequest(f"token id {wrong} is not in the vocabulary of {vocabulary:,} ids", param="ids")
        if not request.ids and start == 0:
            raise InvalidRequest("the session is empty: pass at least one token id", param="ids")
        if request.sampling is not None and request.sampling.tool_choice.mode == "required":
            raise InvalidRequest("tool_choice 'required' needs text: this is a token-level turn", param="tool_choice")
        end = start + len(request.ids)
        spans = [Span(start, end)] if request.ids else []
        return Rendered(list(request.ids), spans, Span(end, end))
    core.tool_use(model.tokenizer, tool_format)
    if request.kind == "continue" and core.last_finish == "length":
        return Rendered([], [], Span(start, start), _calling(core, model, request, tool_format, (), goes_on=True))
    if core.last_item is not None and core.last_item.kind == "tokens":
        raise InvalidRequest("this session holds raw tokens: go on with append_tokens and generate_tokens")
    assert core.ledger is not None
    check_results(core, request.messages)
    calls = core.last_calls if any(m.kind == "tool_result" for m in request.messages) else None
    turn = core.chat(model.tokenizer).turn(
        request.messages,
        core.ledger[-TAIL_TOKENS:],
        first=core.fresh,
        last_tool_calls=calls,
        after_generated=core.last_item is not None and core.last_item.generated,
        generation_prompt=request.sampling is not None,
        last_role=core.last_role,
    )
    spans = [Span(start + span.start, start + span.stop) for _, span in turn.items]
    prompt = Span(start + turn.prompt_span.start, start + turn.prompt_span.stop)
    opened = turn.ids[turn.prompt_span.start :]
    return Rendered(turn.ids, spans, prompt, _calling(core, model, request, tool_format, opened, goes_on=False))


def _calling(
    core: SessionCore, model: LoadedModel, request: TurnInput, tool_format: str, prompt: Sequence[int], *, goes_on: bool
) -> Calling | None:
    sampling = request.sampling
    if sampling is None or sampling.constraint is not None:
        return None
    return prepared(core, model.tokenizer, tool_format, sampling, prompt, goes_on=goes_on)


def retention_ahead(core: SessionCore, request: TurnInput, rendered: Rendered) -> Retention | None:
    """The session's policy, looking at its items and this turn's."""
    if core.policy.window is None:
        return None
    views = items_ahead(core, request, rendered)
    if request.sampling is not None:
        kind = "tokens" if request.raw else "message"
        views.append(ItemView(Span(rendered.prompt.start, 2**62), "assistant", kind, core.record.turns))
    return Retention(core.policy, Span(0, core.record.pinned), tuple(views))


def items_ahead(core: SessionCore, request: TurnInput, rendered: Rendered) -> list[ItemView]:
    """The session's items and this turn's input."""
    turn = core.record.turns
    if request.raw:
        views = [ItemView(span, "user", "tokens", turn) for span in rendered.spans]
    else:
        pairs = zip(request.messages, rendered.spans, strict=False)
        views = [ItemView(span, message.role, message.kind, turn) for message, span in pairs]
    return [*core.views, *views]


def item_records(
    core: SessionCore, request: TurnInput, rendered: Rendered, answer: Message, generated: int
) -> list[ItemRecord]:
    """The turn's items: its input, and where it generates the ``answer`` of so many tokens."""
    items: list[ItemRecord] = []
    assert core.chain is not None
    chain = core.chain.copy()

    def add(role: str, kind: Any, content: Any, span: Span, made: bool) -> None:
        name = (made and request.answer_id) or f"item_{secrets.token_hex(12)}"
        seq = core.items + len(items)
        item = ItemRecord(name, seq, core.record.turns, role, kind, content, span, made)
        items.append(replace(item, chain=chain.then_item(item, core.record)))

    if request.raw:
        for span in rendered.spans:
            add("user", "tokens", {"role": "user", "content": ""}, span, False)
    for message, span in zip(request.messages, rendered.spans, strict=False):
        add(message.role, message.kind, message.canonical(), span, False)
    if request.sampling is not None:
        span = Span(rendered.prompt.start, rendered.prompt.stop + generated)
        add("assistant", "tokens" if request.raw else answer.kind, answer.canonical(), span, True)
    return items


def public_item(record: ItemRecord) -> Item:
    """What users see of an item."""
    return Item(
        id=record.id,
        turn=record.turn,
        role=record.role,
        kind=record.kind,
        content=record.content,
        span=record.span,
        generated=record.generated,
    )
