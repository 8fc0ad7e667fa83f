"""The ``sliding`` policy: the last tokens, whatever they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from agentkv.policies.retention.bounds import AN_EIGHTH, slack_within
from agentkv.policies.retention.contract import RETENTION, RetentionPolicy, SessionView
from agentkv.policies.retention.spans import last, merged
from agentkv.types import Span

__all__ = ["SlidingWindow"]


@RETENTION.register("sliding")
@dataclass(frozen=True, slots=True)
class SlidingWindow(RetentionPolicy):
    """The last tokens and nothing else: the system prompt goes too, and the first tokens, on which attention rests.

    Quality collapses once they are gone. It is here for comparison; use ``sink``.
    """

    name: ClassVar[str] = "sliding"

    window: int
    slack: int = AN_EIGHTH

    def __post_init__(self) -> None:
        object.__setattr__(self, "slack", slack_within(self.name, self.window, self.slack))

    def pinned_tokens(self, pinned: Span) -> int:
        """None is safe."""
        return 0

    def turned_tokens(self, pinned: Span) -> int:
        """None: what stays lies in one piece."""
        return self.pinned_tokens(pinned)

    def keep(self, view: SessionView) -> tuple[Span, ...]:
        """The last ``window - slack`` tokens."""
        return merged(last(view.retained, self.window - self.slack))
