"""The ``sink`` policy: attention sinks and the last tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from agentkv.errors import InvalidRequest
from agentkv.policies.retention.bounds import AN_EIGHTH, is_number, slack_within
from agentkv.policies.retention.contract import RETENTION, RetentionPolicy, SessionView
from agentkv.policies.retention.spans import clip, last, merged, tokens
from agentkv.types import Span

__all__ = ["ATTENTION_SINKS", "SinkWindow"]

ATTENTION_SINKS: Final = 4
"""First tokens of a ledger that attention needs whatever they say: StreamingLLM found four to be enough."""


@RETENTION.register("sink")
@dataclass(frozen=True, slots=True)
class SinkWindow(RetentionPolicy):
    """Sinks and the last tokens (StreamingLLM, https://arxiv.org/abs/2309.17453).

    ``sinks``: ``"system"`` keeps the pinned span, and at least the ledger's first 4 tokens; a number keeps so many
    first tokens, and not what the system prompt has beyond them.
    """

    name: ClassVar[str] = "sink"

    window: int
    sinks: Literal["system"] | int = "system"
    slack: int = AN_EIGHTH

    def __post_init__(self) -> None:
        object.__setattr__(self, "slack", slack_within(self.name, self.window, self.slack))
        most = self.window - 2 * self.slack
        if self.sinks != "system" and not (is_number(self.sinks) and 1 <= self.sinks <= most):
            raise InvalidRequest(
                f"policy {self.name!r} with a window of {self.window:,} and a slack of {self.slack:,} has as sinks "
                f"'system' or a number of first tokens from 1 to {most:,}, not {self.sinks!r}",
                param="policy",
            )

    def pinned_tokens(self, pinned: Span) -> int:
        """The sinks."""
        return max(ATTENTION_SINKS, pinned.stop) if self.sinks == "system" else self.sinks

    def turned_tokens(self, pinned: Span) -> int:
        """The sinks."""
        return self.pinned_tokens(pinned)

    def keep(self, view: SessionView) -> tuple[Span, ...]:
        """The sinks, and the last tokens of the others."""
        sinks = self.pinned_tokens(view.pinned)
        head = clip(view.retained, Span(0, sinks))
        others = clip(view.retained, Span(sinks, view.length))
        return merged((*head, *last(others, self.window - self.slack - tokens(head))))
