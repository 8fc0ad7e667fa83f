"""When a job's session evicts: exactly when its window is full and another token is due, prefilling or decoding.

Eviction points thus follow from ledger, items and policy alone, never from load or from how a prefill is split: a
ledger that is computed again goes through the same evictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentkv.errors import AgentKVError, InvalidRequest
from agentkv.policies.retention import ItemView, RetentionPolicy, SessionView, kept_by
from agentkv.types import Span

__all__ = ["Retention"]


@dataclass(frozen=True, slots=True)
class Retention:
    """A session's policy with what it looks at. ``items`` include the turn under way's; the last may be open-ended.

    The policy is asked once about each state: a prefill is cut by its first answer, which the eviction must repeat.
    """

    policy: RetentionPolicy
    pinned: Span
    items: tuple[ItemView, ...] = ()
    _answers: dict[tuple[int, tuple[Span, ...]], tuple[Span, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def full(self, tokens: int) -> bool:
        """Whether a state that holds ``tokens`` must evict before it takes another."""
        return self.policy.window is not None and tokens >= self.policy.window

    def kept(self, length: int, retained: Sequence[Span]) -> tuple[Span, ...]:
        """What a state that holds ``retained`` of ``length`` ledger tokens keeps.

        ``InvalidRequest`` where the policy breaks its contract or raises.
        """
        state = length, tuple(retained)
        if state not in self._answers:
            try:
                self._answers[state] = kept_by(self.policy, self._view(*state))
            except AgentKVError:
                raise
            except Exception as error:
                raise InvalidRequest(
                    f"retention policy {self.policy.name!r} raised {type(error).__name__}: {error}; its keep() has to "
                    "be mended",
                    param="policy",
                ) from error
        return self._answers[state]

    def _view(self, length: int, retained: tuple[Span, ...]) -> SessionView:
        items = []
        for item in self.items:
            if item.span.start >= length:
                break
            span = Span(item.span.start, min(item.span.stop, length))
            items.append(ItemView(span, item.role, item.kind, item.turn))
        return SessionView(length, retained, self.pinned, tuple(items))

    def cuts(self, length: int, retained: Sequence[Span], tokens: int) -> list[int]:
        """Ledger positions in ``[length, length + tokens)`` before which a prefill evicts."""
        window = self.policy.window
        if window is None:
            return []
        cuts, held, at, end = [], list(retained), length, length + tokens
        while at < end:
            count = sum(len(span) for span in held)
            if count >= window:
                cuts.append(at)
                held = list(self.kept(at, held))
                count = sum(len(span) for span in held)
            new = Span(at, min(end, at + window - count))
            if held and held[-1].stop == at:
                held[-1] = Span(held[-1].start, new.stop)
            else:
                held.append(new)
            at = new.stop
        return cuts
