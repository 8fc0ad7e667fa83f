"""The ``turns`` policy: whole items go, old tool results first, then old turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import ClassVar

from agentkv.errors import InvalidRequest
from agentkv.policies.retention.bounds import AN_EIGHTH, is_number, slack_within
from agentkv.policies.retention.contract import RETENTION, RetentionPolicy, SessionView
from agentkv.policies.retention.sink import ATTENTION_SINKS
from agentkv.policies.retention.spans import clip, last, merged, tokens
from agentkv.types import Span

__all__ = ["TurnWindow"]


@dataclass(frozen=True, slots=True)
class _Unit:
    """What is held of one item, and of the tokens between it and the item before, outside the pinned prefix."""

    kind: str
    turn: int
    held: tuple[Span, ...]


@RETENTION.register("turns")
@dataclass(frozen=True, slots=True)
class TurnWindow(RetentionPolicy):
    """The pinned span (at least the ledger's first 4 tokens) and the latest turns, in whole items.

    Until ``window - slack`` tokens are left, these go, the oldest of each first:

    1. tool results of old turns, if ``drop_tool_results_first``;
    2. old turns, each with all that is left of it;
    3. items of the last ``keep_last_turns`` turns, tool results before others if ``drop_tool_results_first``;
    4. tokens of the last item. Only here does a cut fall inside an item.
    """

    name: ClassVar[str] = "turns"

    window: int
    drop_tool_results_first: bool = True
    keep_last_turns: int = 2
    slack: int = AN_EIGHTH

    def __post_init__(self) -> None:
        object.__setattr__(self, "slack", slack_within(self.name, self.window, self.slack))
        if not isinstance(self.drop_tool_results_first, bool):
            raise InvalidRequest(
                f"policy {self.name!r}: drop_tool_results_first is true or false, not {self.drop_tool_results_first!r}",
                param="policy",
            )
        if not is_number(self.keep_last_turns) or self.keep_last_turns < 1:
            raise InvalidRequest(
                f"policy {self.name!r} keeps at least 1 last turn, not {self.keep_last_turns!r}", param="policy"
            )

    def pinned_tokens(self, pinned: Span) -> int:
        """The pinned span, and at least the attention sinks."""
        return max(ATTENTION_SINKS, pinned.stop)

    def keep(self, view: SessionView) -> tuple[Span, ...]:
        """The pinned prefix and every item that fits, by the order above."""
        head = clip(view.retained, Span(0, self.pinned_tokens(view.pinned)))
        budget = self.window - self.slack - tokens(head)
        units = self._units(view)
        total = sum(tokens(unit.held) for unit in units)
        gone: set[int] = set()
        for victims in self._victims(units):
            if total <= budget:
                break
            total -= sum(tokens(units[i].held) for i in victims if i not in gone)
            gone.update(victims)
        left = [span for i, unit in enumerate(units) if i not in gone for span in unit.held]
        return merged((*head, *last(left, budget)))

    def _units(self, view: SessionView) -> list[_Unit]:
        """The items beyond the pinned prefix, in order. Without items, all tokens are one.

        Tokens after the last item count with it until their own is there: alone they would be the last item, and what
        is about to be answered would go before them.
        """
        start = self.pinned_tokens(view.pinned)
        items = [item for item in view.items if len(item.span) and item.span.stop > start]
        if not items:
            return [_Unit("tokens", 0, clip(view.retained, Span(start, view.length)))]
        stops = [*(item.span.stop for item in items[:-1]), view.length]
        starts = [start, *stops[:-1]]
        return [
            _Unit(item.kind, item.turn, clip(view.retained, Span(*ends)))
            for item, *ends in zip(items, starts, stops, strict=True)
        ]

    def _victims(self, units: Sequence[_Unit]) -> Iterator[list[int]]:
        """Indices of the units that go together, group by group; never the last unit."""
        latest = dict.fromkeys(unit.turn for unit in reversed(units))
        recent = set(islice(latest, self.keep_last_turns))
        old = [i for i, unit in enumerate(units) if unit.turn not in recent]
        late = [i for i, unit in enumerate(units[:-1]) if unit.turn in recent]
        if self.drop_tool_results_first:
            yield from ([i] for i in old if units[i].kind == "tool_result")
            late.sort(key=lambda i: units[i].kind != "tool_result")
        for _, turn in groupby(old, key=lambda i: units[i].turn):
            yield list(turn)
        yield from ([i] for i in late)
