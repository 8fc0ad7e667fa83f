"""The ``full`` policy: everything stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agentkv.policies.retention.contract import RETENTION, RetentionPolicy, SessionView
from agentkv.policies.retention.spans import merged
from agentkv.types import Span

__all__ = ["Full"]


@RETENTION.register("full")
@dataclass(frozen=True, slots=True)
class Full(RetentionPolicy):
    """Nothing is evicted: a session ends at the model's context limit."""

    name: ClassVar[str] = "full"

    @property
    def window(self) -> None:
        """None."""
        return None

    def keep(self, view: SessionView) -> tuple[Span, ...]:
        """All that is held."""
        return merged(view.retained)
