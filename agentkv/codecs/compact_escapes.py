"""Levels too far out for int8: the symbol stays at the end of its range, and what is missing is listed exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LARGEST", "Escapes", "symbols_of"]

LARGEST = 127
"""Symbols are whole numbers up to this, either side of 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Escapes:
    """At ``rows [E]`` and ``tokens [E]`` (int64) a level has ``excess [E]`` (float32) beyond its symbol.

    Rows of several layers are counted through, one layer after the other.
    """

    rows: Tensor
    tokens: Tensor
    excess: Tensor

    def split(self, row: int, rows: int) -> tuple[Escapes, Escapes]:
        """Those before ``row`` of the ``rows`` of their layer, and those from it on: counted among these alone."""
        layer, of_layer = self.rows // rows, self.rows % rows
        before = of_layer < row
        sides = (before, layer * row + of_layer), (~before, layer * (rows - row) + of_layer - row)
        first, second = (Escapes(each[here], self.tokens[here], self.excess[here]) for here, each in sides)
        return first, second


def symbols_of(levels: Tensor, out: Tensor) -> Escapes | None:
    """Round ``levels [rows, T]`` float32 into ``out`` int8 of that shape; what that leaves out, or ``None``.

    ``ValueError`` where they are not finite.
    """
    symbols = levels.round()
    low, high = symbols.aminmax()
    if low >= -LARGEST and high <= LARGEST:
        out.copy_(symbols)
        return None
    if not (low.isfinite() and high.isfinite()):
        raise ValueError(f"levels between {float(low)} and {float(high)} cannot be rounded")
    rows, tokens = (symbols.abs() > LARGEST).nonzero(as_tuple=True)
    out.copy_(symbols.clamp_(-LARGEST, LARGEST))
    return Escapes(rows, tokens, levels[rows, tokens] - out[rows, tokens])
