"""How fast this machine computes and restores, measured as it goes, and what either is expected to take next."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Estimate", "Rates"]

_WEIGHT = 0.25
"""Of the newest measurement: four or five of them forget what was before."""
_TELLING = 32
"""Tokens below which a measurement is mostly fixed cost."""
_NARROW = 0.25
"""Measurements whose lengths differ by less than this share of their mean say little about what is fixed cost."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Expected seconds, ``None`` where nothing was measured yet."""

    restore: float | None
    recompute: float | None


@dataclass(slots=True)
class _Line:
    """Seconds over tokens: a fixed cost and one a token, fitted to the newest measurements.

    The line runs through their mean, and lies between two others: that all cost is by the token, which is what it is
    taken for while lengths have not differed, and that all of it is fixed. ``longest``: tokens of the longest one.
    """

    longest: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        weight = _WEIGHT if self.longest else 1.0
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)
        self.squares += weight * (tokens * tokens - self.squares)
        self.products += weight * (tokens * seconds - self.products)
        self.longest = max(self.longest, tokens)

    def at(self, tokens: int) -> float | None:
        if not self.longest:
            return None
        each = self.seconds / self.tokens
        narrow = (_NARROW * self.tokens) ** 2
        variance = self.squares - self.tokens * self.tokens
        covariance = self.products - self.tokens * self.seconds
        slope = min(max(0.0, (covariance + narrow * each) / (variance + narrow)), each)
        return self.seconds + slope * (tokens - self.tokens)


@dataclass(slots=True)
class Rates:
    """Seconds of prefill, and of restoring from each tier, by tokens. One model's, one runtime's."""

    _prefill: _Line = field(default_factory=_Line)
    _restore: dict[str, _Line] = field(default_factory=dict)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A prefill of so many tokens took so long, neighbours included."""
        if tokens >= _TELLING and seconds > 0:
            self._prefill.add(tokens, seconds)

    def restored(self, source: str, tokens: int, seconds: float) -> None:
        """A restore from ``source`` (``host``, ``disk``) took so long."""
        if tokens >= _TELLING and seconds > 0:
            self._restore.setdefault(source, _Line()).add(tokens, seconds)

    def forget(self, source: str) -> None:
        """What was measured of ``source`` does not hold any more."""
        self._restore.pop(source, None)

    def longest(self, source: str) -> int:
        """Tokens of the longest restore from ``source`` that was measured; 0 before the first."""
        return self._restore[source].longest if source in self._restore else 0

    def estimate(self, source: str, tokens: int) -> Estimate:
        """Bringing ``tokens`` tokens back from ``source``, or computing them again."""
        known = self._restore.get(source)
        return Estimate(None if known is None else known.at(tokens), self._prefill.at(tokens))

    def told(self, tokens: int) -> dict[str, float]:
        """Expected seconds for ``tokens`` tokens by what was measured: ``prefill``, ``host``, ``disk``."""
        lines = {"prefill": self._prefill, **self._restore}
        expected = {name: line.at(tokens) for name, line in lines.items()}
        return {name: seconds for name, seconds in expected.items() if seconds is not None}
