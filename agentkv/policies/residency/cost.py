"""``cost``: what it is expected to cost that a session is gone, for the bytes that frees."""

from __future__ import annotations

from agentkv.policies.residency.contract import RESIDENCY, ResidencyPolicy, SessionFacts

__all__ = ["Cost"]

_SOONEST = 0.05
"""Seconds below which it makes no difference how soon a session comes back."""
_UNKNOWN = 30.0
"""A pause, in seconds, of a session that has not paused yet."""


@RESIDENCY.register("cost")
class Cost(ResidencyPolicy):
    """Restore seconds a byte and second of waiting: keep what is dear to bring back, small, and wanted soon.

    As GreedyDual-Size-Frequency (Cherkasova, HP Labs 1998) weighs cost and use against size; use is the rate at which
    the session is expected back: by its user's hint, else by its own pauses, and the later the longer the present one
    lasts already: tools that have not answered soon take long.
    """

    name = "cost"

    def worth(self, facts: SessionFacts) -> float:
        """Expected seconds lost a second of waiting, for each byte freed."""
        return facts.restore / (max(1, facts.nbytes) * self._seconds_away(facts))

    @staticmethod
    def _seconds_away(facts: SessionFacts) -> float:
        if facts.expected is not None:
            # A hint that has passed is wrong by at least so much: it may be wrong by as much again.
            return max(_SOONEST, facts.expected if facts.expected >= 0 else -facts.expected)
        return max(_SOONEST, (_UNKNOWN if facts.gap is None else facts.gap) + facts.idle)
