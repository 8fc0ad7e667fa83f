"""What of a ledger is in the KV state, for people: spans, gaps, item by item. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentkv.schemas.replies import ItemState
from agentkv.sessions.db.records import ItemRecord
from agentkv.types import Placement, Span

__all__ = ["gaps", "held_spans", "item_states"]


def held_spans(placement: Placement, ledger_length: int) -> tuple[Span, ...]:
    """What is kept of the ledger: what is held, and the last tokens, whose KV comes with the next turn."""
    if ledger_length <= placement.length:
        return placement.kept
    if placement.kept and placement.kept[-1].stop == placement.length:
        return (*placement.kept[:-1], Span(placement.kept[-1].start, ledger_length))
    return (*placement.kept, Span(placement.length, ledger_length))


def gaps(kept: Sequence[Span], length: int) -> tuple[Span, ...]:
    """What of ``[0, length)`` is in none of ``kept``."""
    starts = [0, *(span.stop for span in kept)]
    stops = [*(span.start for span in kept), length]
    return tuple(Span(a, b) for a, b in zip(starts, stops, strict=True) if a < b)


def item_states(items: Sequence[ItemRecord], kept: Sequence[Span]) -> Iterator[ItemState]:
    """How much of each item is kept."""
    for item in items:
        tokens = sum(len(item.span.intersect(span)) for span in kept)
        evicted = tokens == 0 and len(item.span) > 0
        yield ItemState(item.id, item.turn, item.role, item.kind, item.span, tokens, evicted)
