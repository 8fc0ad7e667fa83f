"""What of a ledger is in the KV state, for people: spans, gaps, item by item. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentkv.schemas.replies import ItemState
from agentkv.sessions.db.records import ItemRecord
from agentkv.types import KVGeometry, Placement, Span

__all__ = ["bytes_by_layers", "gaps", "held_spans", "item_states"]


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


def bytes_by_layers(geometry: KVGeometry, placement: Placement) -> dict[str, int]:
    """Bytes of KV that a state with this placement holds, by layer group."""
    sizes: dict[str, int] = {}
    for group in geometry.groups:
        sliding = min(placement.length - placement.floor, group.window or 0)
        tokens = placement.tokens if group.window is None else sliding
        sizes[group.name] = sizes.get(group.name, 0) + tokens * group.values_per_token * geometry.itemsize
    return sizes
