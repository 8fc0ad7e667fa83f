"""The ``adaptive`` policy: everything as long as that fits, then a window of the kind that suits the conversation.

What is in force changes at a turn's start alone. It follows from the ledger and the items as the turn will leave them,
from what the turn asks for, and from settings; never from load, or from what other sessions do. So the same
conversation under the same settings evicts the same tokens at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from agentkv.errors import InvalidRequest
from agentkv.policies.retention.contract import RETENTION, ItemView, RetentionPolicy, SessionView, check_fits
from agentkv.policies.retention.parse import parse_policy, policy_text
from agentkv.types import Span

__all__ = ["Adaptive", "Ahead", "suited", "tool_share", "window_kind"]

_DOMINANT = 0.5
"""Share of tool results above which they are what a conversation consists of, and can best spare."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """A session and the turn that it begins.

    ``tokens``: most that it would hold at the turn's end if nothing were evicted. ``items``: the turn's input included.
    ``whole``: nothing was evicted so far. ``context``: tokens that the model attends to. ``share``: tokens that the
    session's share of the device budget holds.
    """

    tokens: int
    pinned: Span
    items: Sequence[ItemView]
    whole: bool
    context: int
    share: int


@RETENTION.register("adaptive")
@dataclass(frozen=True, slots=True)
class Adaptive(RetentionPolicy):
    """``full``, until a turn would outgrow the model's context or the session's share of the device budget; from then
    on ``turns`` where tool results dominate, else ``sink``, with the widest window that fits.

    ``now``: text of the policy in force. Sessions begin with ``full``; the others are for sessions to remember.
    """

    name: ClassVar[str] = "adaptive"

    now: str = "full"
    in_force: RetentionPolicy = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        policy = parse_policy(self.now)
        if isinstance(policy, Adaptive):
            raise InvalidRequest(f"policy {self.name!r} cannot be adaptive inside: {self.now!r}", param="policy")
        object.__setattr__(self, "in_force", policy)
        object.__setattr__(self, "now", policy_text(policy))

    @property
    def window(self) -> int | None:
        """That of the policy in force."""
        return self.in_force.window

    @property
    def slack(self) -> int:
        """That of the policy in force."""
        return self.in_force.slack

    @property
    def evicts(self) -> bool:
        """In the end, always."""
        return True

    def pinned_tokens(self, pinned: Span) -> int:
        """Those of the policy in force; ``full`` promises the pinned span, which its successor must find."""
        return self.in_force.pinned_tokens(pinned)

    def turned_tokens(self, pinned: Span) -> int:
        """Those of the policy in force."""
        return self.in_force.turned_tokens(pinned)

    def keep(self, view: SessionView) -> tuple[Span, ...]:
        """What the policy in force keeps."""
        return self.in_force.keep(view)

    def at_turn(self, ahead: Ahead) -> Adaptive:
        """The policy for the turn that begins, and until another turn changes it.

        As long as nothing is evicted each turn decides anew. Then a window stays, unless settings or the model leave
        less room than it has. Where what is pinned needs more than the share, the context alone is the limit; where it
        leaves no room there either, all stays as it is.
        """
        kind, narrow = window_kind(tool_share(ahead.items, ahead.pinned)), min(ahead.context, ahead.share)
        policy = suited(kind, ahead.pinned, narrow, ahead.context)
        if policy is None or policy.window is None:
            return self
        if ahead.whole or self.window is None:
            return Adaptive() if ahead.tokens <= policy.window else Adaptive(policy_text(policy))
        return self if self.window <= policy.window else Adaptive(policy_text(policy))


def tool_share(items: Sequence[ItemView], pinned: Span) -> float:
    """Of the tokens of ``items`` behind the pinned span, the share in tool results; 0 where there are none."""
    said = [item for item in items if item.span.start >= pinned.stop]
    results = sum(len(item.span) for item in said if item.kind == "tool_result")
    return results / max(1, sum(len(item.span) for item in said))


def window_kind(share: float) -> str:
    """The policy with a window for a conversation in which tool results have this share of the tokens."""
    return "turns" if share > _DOMINANT else "sink"


def suited(kind: str, pinned: Span, *windows: int) -> RetentionPolicy | None:
    """The ``kind`` of policy, with the first of ``windows`` that leaves room beside what is pinned.

    Else with the last, the model's context, in steps small enough for that; ``None`` where it has no room at all.
    """
    context = windows[-1]
    for text in (*(f"{kind}:{window}" for window in windows), f"{kind}:{context},slack={(context - pinned.stop) // 4}"):
        try:
            policy = parse_policy(text)
            check_fits(policy, pinned, context)
        except InvalidRequest:
            continue
        return policy
    return None
