"""How fast this machine computes and restores, measured as it goes, and what either is expected to take next."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Estimate", "Rates"]

_WEIGHT = 0.25
"""Of the newest measurement: four or five of them forget what was before."""
_TELLING = 32
"""Tokens below which a measurement is mostly fixed cost."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Expected seconds, ``None`` where nothing was measured yet."""

    restore: float | None
    recompute: float | None


@dataclass(slots=True)
class _Mean:
    """Exponential mean of seconds a unit."""

    value: float | None = None

    def add(self, seconds: float, units: int) -> None:
        each = seconds / units
        self.value = each if self.value is None else self.value + _WEIGHT * (each - self.value)

    def of(self, units: int) -> float | None:
        return None if self.value is None else self.value * units


@dataclass(slots=True)
class Rates:
    """Seconds a token of prefill, and of restoring from each tier. One model's, one runtime's."""

    _prefill: _Mean = field(default_factory=_Mean)
    _restore: dict[str, _Mean] = field(default_factory=dict)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A prefill of so many tokens took so long, neighbours included."""
        if tokens >= _TELLING and seconds > 0:
            self._prefill.add(seconds, tokens)

    def restored(self, source: str, tokens: int, seconds: float) -> None:
        """A restore from ``source`` (``host``, ``disk``) took so long."""
        if tokens >= _TELLING and seconds > 0:
            self._restore.setdefault(source, _Mean()).add(seconds, tokens)

    def estimate(self, source: str, tokens: int) -> Estimate:
        """Bringing ``tokens`` tokens back from ``source``, or computing them again."""
        known = self._restore.get(source)
        return Estimate(None if known is None else known.of(tokens), self._prefill.of(tokens))
