"""What a conversation begins with: its system prompt and tools, which are frozen with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentkv.sessions.db.records import ItemRecord, SessionRecord

__all__ = ["Head", "behind_head", "in_head", "joined"]


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


def in_head(record: SessionRecord, item: ItemRecord) -> bool:
    """Whether an item is the session's head, and not something that was said."""
    return bool(record.pinned) and item.turn == 0


def behind_head(record: SessionRecord, items: Iterable[ItemRecord]) -> list[ItemRecord]:
    """What was said behind the head."""
    return [item for item in items if not in_head(record, item)]


def joined(*texts: str | None) -> str | None:
    """As one system prompt; ``None`` where there is none."""
    said = [text for text in texts if text]
    return "\n\n".join(said) if said else None
