"""What a retention policy is: a view of the session to the spans that stay in the KV state. It never sees a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from types import DynamicClassAttribute
from typing import Any, ClassVar

from agentkv.errors import InvalidRequest
from agentkv.policies.retention.spans import clip, merged, tokens
from agentkv.registry import Registry
from agentkv.types import Span

__all__ = ["RETENTION", "ItemView", "RetentionPolicy", "SessionView", "check_fits", "kept_by"]


@dataclass(frozen=True, slots=True)
class ItemView:
    """One item: its ledger span, its role, and the sequence number of the turn that added it (0: the head).

    ``kind``: ``message``, ``tool_call``, ``tool_result``, or ``tokens`` for what was added as bare token ids.
    """

    span: Span
    role: str
    kind: str
    turn: int


@dataclass(frozen=True, slots=True)
class SessionView:
    """What a policy decides on.

    ``length``: ledger tokens so far. ``retained``: what is held, in order and disjoint. ``pinned``: the span
    ``[0, n)`` of system prompt and tools, possibly empty. ``items``: in ledger order, clipped to ``length``, the last
    one may still grow. Tokens between two items belong to the following one.
    """

    length: int
    retained: tuple[Span, ...]
    pinned: Span
    items: tuple[ItemView, ...]


class RetentionPolicy(ABC):
    """Which tokens stay in the KV state.

    A policy is a frozen dataclass with the fields ``window`` and, if it can be chosen, ``slack``; it is registered as
    ``@RETENTION.register(name)`` above ``@dataclass``. Fields of type int, bool, str or None can be written as text.
    """

    __slots__ = ()

    name: ClassVar[str]

    # Not plain properties: @dataclass would take an inherited property for the default of a field of the same name.

    @DynamicClassAttribute
    def window(self) -> int | None:
        """Most tokens held at any time; ``None`` where nothing is ever evicted."""
        raise NotImplementedError(f"the retention policy {type(self).__name__} does not define `window`")

    @DynamicClassAttribute
    def slack(self) -> int:
        """Tokens freed by one eviction, at least 1."""
        return max(1, (self.window or 0) // 8)

    @DynamicClassAttribute
    def evicts(self) -> bool:
        """Whether it evicts, under these arguments or those it will have."""
        return self.window is not None

    def turned_tokens(self, pinned: Span) -> int:
        """How many of the first tokens held may come to lie before a gap: their keys are then kept twice, as they were
        computed and turned on. Where only a head and the last tokens stay, that is the head."""
        return self.window or 0

    def pinned_tokens(self, pinned: Span) -> int:
        """How many tokens from the ledger's start are never evicted, given the session's pinned span."""
        return pinned.stop

    @abstractmethod
    def keep(self, view: SessionView) -> tuple[Span, ...]:
        """What to keep of ``view.retained``: at most ``window - slack`` tokens, in order, adjacent spans merged.

        Pure: the same view always gives the same spans. Called when exactly ``window`` tokens are retained (more, where
        the policy of a living session was changed), before the next one is computed.
        """


RETENTION: Registry[type[RetentionPolicy]] = Registry("retention", "retention policy")


def kept_by(policy: RetentionPolicy, view: SessionView) -> tuple[Span, ...]:
    """``policy.keep(view)``, checked. ``InvalidRequest`` says how the policy broke its contract, whoever wrote it."""
    answer: Any = policy.keep(view)
    try:
        kept = tuple(Span(*span) for span in answer)
    except TypeError:
        raise _broken(policy, f"returned {answer!r}, which is not a sequence of spans") from None
    for span in kept:
        if not (isinstance(span.start, int) and isinstance(span.stop, int) and span.start < span.stop):
            raise _broken(policy, f"returned {_text(span)}, which is not a span of at least one token")
    for one, other in pairwise(kept):
        if one.stop > other.start:
            raise _broken(policy, f"returned {_text(one)} before {_text(other)}: out of order or overlapping")
        if one.stop == other.start:
            raise _broken(policy, f"returned {_text(one)} and {_text(other)}, which are adjacent and not merged")
    retained = merged(view.retained)
    for span in kept:
        if clip(retained, span) != (span,):
            raise _broken(
                policy, f"returned {_text(span)}, of which only {tokens(clip(retained, span)):,} tokens are held"
            )
    held, left, window = tokens(retained), tokens(kept), policy.window
    if window is None:
        if left != held:
            raise _broken(policy, f"has no window, yet kept {left:,} of {held:,} tokens")
    elif left >= window:
        raise _broken(policy, f"kept {left:,} of {held:,} tokens where its window of {window:,} needs room for another")
    promised = Span(0, policy.pinned_tokens(view.pinned))
    lost = tokens(clip(retained, promised)) - tokens(clip(kept, promised))
    if lost:
        raise _broken(policy, f"evicted {lost:,} of the {len(promised):,} tokens it promised never to evict")
    return kept


def check_fits(policy: RetentionPolicy, pinned: Span, context_limit: int) -> None:
    """``InvalidRequest`` unless a session with this pinned span can go on for ever under ``policy``.

    ``context_limit``: tokens that the model can attend to.
    """
    if policy.window is None:
        return
    window, slack, never = policy.window, policy.slack, policy.pinned_tokens(pinned)
    if window > context_limit:
        raise InvalidRequest(
            f"policy {policy.name!r} has a window of {window:,} tokens, the model's context limit is "
            f"{context_limit:,}: choose a window of at most {context_limit:,}",
            param="policy",
        )
    if never + slack > window - slack:
        raise InvalidRequest(
            f"policy {policy.name!r} never evicts the {never:,} pinned tokens of this session, which leaves no room in "
            f"a window of {window:,} with a slack of {slack:,}: choose a window of at least {never + 2 * slack:,} at "
            "this slack, or a shorter system prompt or fewer tools",
            param="policy",
        )


def _broken(policy: RetentionPolicy, what: str) -> InvalidRequest:
    return InvalidRequest(f"retention policy {policy.name!r} {what}; its keep() has to be mended", param="policy")


def _text(span: Span) -> str:
    return f"[{span.start}, {span.stop})"
