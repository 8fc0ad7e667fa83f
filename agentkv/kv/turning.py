"""How far keys are turned: what lies before a gap is attended as if it lay directly before what follows."""

from __future__ import annotations

from collections.abc import Sequence

from agentkv.types import Placement, Span

__all__ = ["deltas_of", "turned_of", "turned_tokens"]


def deltas_of(placement: Placement, held: Sequence[Span]) -> list[tuple[int, int]]:
    """How far each run of ``held`` is turned, ``(tokens, delta)``, so that all lie one after the other before the next
    position."""
    seen = placement.next_position - sum(len(span) for span in held)
    deltas = []
    for run in placement.runs(held):
        deltas.append((len(run), seen - placement.position_of(run.start)))
        seen += len(run)
    return deltas


def turned_tokens(deltas: Sequence[tuple[int, int]]) -> int:
    """How many leading tokens it takes to have all that are turned; ``deltas``: ``(tokens, delta)`` in order."""
    moved = total = 0
    for tokens, delta in deltas:
        total += tokens
        moved = total if delta else moved
    return moved


def turned_of(placement: Placement) -> int:
    """How many of the first tokens that full groups hold are turned on, and have masters."""
    return turned_tokens(deltas_of(placement, placement.kept))
