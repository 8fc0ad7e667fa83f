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
    """At ``rows [E]`` and ``tokens [E]`` (int64) a level has ``excess [E]`` (float32) beyond its symbol."""

    rows: Tensor
    tokens: Tensor
    excess: Tensor

    def within(self, start: int, stop: int) -> Escapes:
        """Those in rows ``[start, stop)``, counted from ``start``."""
        here = (self.rows >= start) & (self.rows < stop)
        return Escapes(self.rows[here] - start, self.tokens[here], self.excess[here])


def symbols_of(levels: Tensor) -> tuple[Tensor, Escapes] | None:
    """``levels [rows, T]`` float32 -> symbols ``[rows, T]`` int8 and what they leave out; ``None`` if not finite."""
    import torch

    symbols = levels.round()
    low, high = symbols.aminmax()
    if not (low.isfinite() and high.isfinite()):
        return None
    if low >= -LARGEST and high <= LARGEST:
        none = torch.empty(0, dtype=torch.int64, device=levels.device)
        return symbols.to(torch.int8), Escapes(none, none, torch.empty(0, device=levels.device))
    rows, tokens = (symbols.abs() > LARGEST).nonzero(as_tuple=True)
    symbols = symbols.clamp_(-LARGEST, LARGEST).to(torch.int8)
    return symbols, Escapes(rows, tokens, levels[rows, tokens] - symbols[rows, tokens])
