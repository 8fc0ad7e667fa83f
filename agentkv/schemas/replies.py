"""What turns return: replies, stream events, items, session states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agentkv.schemas.messages import ToolCall
from agentkv.types import FinishReason, RestoreReport, SessionState, Span, Tier, Usage

__all__ = [
    "Begun",
    "Done",
    "Event",
    "Item",
    "ItemState",
    "Logprob",
    "Reply",
    "SessionInfo",
    "TextDelta",
    "ToolCallEvent",
]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A generated token, its natural-log probability, and the likeliest alternatives (id, log-probability)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One message, tool call or tool result, and the ledger positions it occupies."""

    id: str
    turn: int
    role: str
    kind: Literal["message", "tool_call", "tool_result", "tokens"]
    content: Mapping[str, Any]
    span: Span
    generated: bool

    @property
    def text(self) -> str:
        """The message's text; empty for token-level items."""
        return str(self.content.get("content") or "")


@dataclass(frozen=True, slots=True)
class Reply:
    """One committed turn's answer.

    ``ids``: the generated tokens, an end token included. ``ttft_seconds``: from the call to the first token,
    restoring included. ``seed``: what reproduces it; ``None`` for greedy decoding. ``tool_calls``: what the model
    calls, no part of ``text``; ``finish_reason`` is then ``tool_calls``, unless the reply was cut (``length``).
    ``parsed``: with ``schema=`` what the text says, an object of the pydantic class or plain JSON; where there is none
    although it was asked for, ``unparsed`` says why, first of all that ``max_tokens`` cut it.
    """

    session_id: str
    item_id: str
    text: str
    finish_reason: FinishReason
    usage: Usage
    restore: RestoreReport
    ttft_seconds: float
    seconds: float
    ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None = None
    seed: int | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    parsed: Any = None
    unparsed: str | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """What KV there was is on the device: of the turn's ``prompt_tokens``, ``cached_tokens`` have theirs and the others
    are computed now. ``restore``: where it came from. ``text`` is empty, as in ``Done``."""

    session_id: str
    prompt_tokens: int
    cached_tokens: int
    restore: RestoreReport
    text: str = ""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the reply; whole characters only. ``logprobs``, if asked for: of the tokens since the last one."""

    text: str
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallEvent:
    """A tool call is complete: the reply's ``index``-th, from 0. ``text`` is empty, as in ``Done``."""

    call: ToolCall
    index: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """The last event: the turn is committed. ``text`` is empty, so that printing every event prints the reply."""

    reply: Reply
    text: str = ""


Event = Begun | TextDelta | ToolCallEvent | Done


@dataclass(frozen=True, slots=True)
class ItemState:
    """One item and how much of it is in the KV state: ``kept`` of its tokens. ``evicted``: nothing of it."""

    id: str
    turn: int
    role: str
    kind: str
    span: Span
    kept: int
    evicted: bool


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as it is now.

    ``ledger_tokens``: the conversation's length. ``kv_tokens``: of which have KV, on the device if ``state`` is
    ``live``. ``stored_tokens``: of which are on disk. Bytes: reserved on the device, encoded in host memory, encoded
    on disk. ``kept`` and ``evicted``: spans of the ledger that the retention policy holds or gave up, ``items`` the
    same item by item; ``kept`` includes the last token, whose KV comes with the next turn. ``pinned``: the span of
    system prompt and tools. ``next_position``: at which the next token will be computed. ``bytes_by_layers``: bytes of
    the held tokens' KV, by layer group (``full…``, ``sliding:…``).
    """

    id: str
    agent_id: str | None
    state: SessionState
    tier: Tier | None
    busy: bool
    model: str
    policy: str
    idle_codec: str
    turns: int
    ledger_tokens: int
    kv_tokens: int
    stored_tokens: int
    pinned: Span
    kept: tuple[Span, ...]
    evicted: tuple[Span, ...]
    items: tuple[ItemState, ...]
    next_position: int
    bytes_by_layers: Mapping[str, int]
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    created_at: float
    updated_at: float
    metadata: Mapping[str, Any]
