"""A conversation as a client without sessions sends it: all of it, each time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Self

from agentkv.errors import InvalidRequest
from agentkv.schemas.messages import Message, MessageInput, normalise
from agentkv.sessions.db.records import ItemRecord, SessionRecord
from agentkv.sessions.heads import Head

__all__ = ["History", "messages_in", "same_calls"]


@dataclass(frozen=True, slots=True)
class History:
    """``messages`` without the system prompt, which is ``system`` (``None``: there is none, or it is not said)."""

    messages: tuple[Message, ...]
    system: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        messages: MessageInput,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> Self:
        """From OpenAI's list. Raises as ``normalise`` does, and where there is nothing but a system prompt."""
        said = normalise(messages)
        system = said.pop(0).text if said[0].role in ("system", "developer") else None
        if not said:
            raise InvalidRequest("messages: there is a system prompt and nothing to answer", param="messages")
        return cls(tuple(said), system, tuple(map(dict, tools)) if tools else None, dict(template_args or {}))

    @property
    def whole(self) -> bool:
        """Whether it can only be a whole conversation: it has a system prompt, or the model's own messages."""
        return self.system is not None or any(message.role == "assistant" for message in self.messages)

    def same_head(self, record: SessionRecord) -> bool:
        """Whether system prompt, tools and template arguments are the session's."""
        return Head(self.system, self.tools).same(record) and dict(self.template_args) == record.template_args

    def filled(self, record: SessionRecord) -> History:
        """With what it leaves unsaid as the session has it."""
        return replace(
            self,
            system=record.system if self.system is None else self.system,
            tools=(tuple(record.tools) if record.tools else None) if self.tools is None else self.tools,
            template_args=self.template_args or record.template_args,
        )


def messages_in(items: Iterable[ItemRecord]) -> list[Message]:
    """What was said, up to the first item that is raw tokens and no message."""
    return [Message.from_canonical(item.content) for item in takewhile(lambda item: item.kind != "tokens", items)]


def same_calls(new: Sequence[Message], said: Sequence[Message], stored: Sequence[ItemRecord]) -> tuple[Message, ...]:
    """``new``, its tool results naming the calls by the ids that they have in ``stored``.

    ``said``: the messages before, the same as ``stored`` but for their ids.
    """
    theirs = [call.id for message in said for call in message.tool_calls]
    ours = [call["id"] for item in stored if item.kind != "tokens" for call in item.content.get("tool_calls", ())]
    names = dict(zip(theirs, ours, strict=True))
    renamed = []
    for message in new:
        for call in message.tool_calls:
            names.pop(call.id, None)  # a new call of that name is meant from here on
        known = names.get(message.tool_call_id or "")
        renamed.append(message if known is None else message.model_copy(update={"tool_call_id": known}))
    return tuple(renamed)
