"""Restore or recompute: what was measured decides, restore by restore.

Until both are measured, what is stored is restored, however little: that takes milliseconds as a rule, and is how its
rate comes to be known. From then on a restore is passed over where computing the same tokens is expected to be clearly
faster. A source that is passed over is not measured, so it is tried all the same now and then: after 2 recomputes, then
after 4, 8, … 64 more. Whatever is restored in spite of its estimate (a trial, a prefetch, a session that is always
restored) and turns out much faster makes the old measurements void.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentkv.codecs import Codec
from agentkv.sessions.core import SessionCore
from agentkv.sessions.rates import Estimate, Rates
from agentkv.types import KVGeometry, RestoreReport

__all__ = ["Choice", "Choosing", "interchangeable"]

_CLEARLY = 1.2
"""Times that a restore must be expected to take longer than a recompute, for which all others on the device wait."""
_NOTICED = 0.02
"""Seconds that a recompute must be expected to save."""
_FAR = 4
"""Sessions longer than so many times the longest measured restore are restored: fixed costs would count as if each
token had them."""
_FIRST_TRIAL, _LAST_TRIAL = 2, 64
"""Recomputes before a source that is passed over is tried again: the first time, and at most."""
_WRONG = 2
"""A restore that takes so many times less than was expected was expected from what does not hold any more."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What either way is expected to take, and why stored KV is computed: ``None`` where it is restored."""

    estimate: Estimate
    reason: str | None = None
    """For people; see ``RestoreReport.chosen``."""

    def told(self, report: RestoreReport) -> RestoreReport:
        """The report of what was done, with both estimates."""
        restore, compute = self.estimate.restore, self.estimate.recompute
        return replace(report, estimated_restore_seconds=restore, estimated_recompute_seconds=compute)


@dataclass(slots=True)
class _PassedOver:
    """Recomputes since a source was tried last, and how many there may be."""

    recomputes: int = 0
    most: int = _FIRST_TRIAL


def interchangeable(core: SessionCore, codec: Codec, geometry: KVGeometry) -> bool:
    """Whether the session's KV may be computed although it is stored, in ``codec``.

    Not where the codec is lossless: how a prefill is split shows in the bits, and such a session is to go on as if it
    had never slept. Not where a policy evicts: window keys had seen what is gone. Not with sliding or recurrent
    layers: they store what is needed to go on at some places, and would compute everything.
    """
    full = all(group.window is None for group in geometry.groups)
    return full and not codec.exact and not core.evicts


class Choosing:
    """Decides for one runtime. Runs on the event loop."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._passed_over: dict[str, _PassedOver] = {}

    def restore(self, source: str, tokens: int) -> Choice:
        """They are restored, whatever it takes."""
        return Choice(self._rates.estimate(source, tokens))

    def choose(self, source: str, tokens: int) -> Choice:
        """Whether ``tokens`` stored tokens are restored from ``source`` or computed."""
        estimate = self._rates.estimate(source, tokens)
        if not self._slower(source, tokens, estimate):
            self._passed_over.pop(source, None)
            return Choice(estimate)
        passed_over = self._passed_over.setdefault(source, _PassedOver())
        if passed_over.recomputes >= passed_over.most:
            self._passed_over[source] = _PassedOver(most=min(2 * passed_over.most, _LAST_TRIAL))
            return Choice(estimate)
        passed_over.recomputes += 1
        expected = f"{estimate.recompute:.3f} s, restoring them from {source} {estimate.restore:.3f} s"
        return Choice(estimate, f"cheaper: computing {tokens:,} tokens is expected to take {expected}")

    def restored(self, report: RestoreReport) -> None:
        """Measure what was restored; ``report`` has the estimates of its choice."""
        expected = Estimate(report.estimated_restore_seconds, report.estimated_recompute_seconds)
        better = expected.restore is not None and _WRONG * report.seconds < expected.restore
        if better and report.reason is None and self._slower(report.source, report.tokens, expected):
            self._rates.forget(report.source)
        self._rates.restored(report.source, report.tokens, report.seconds)

    def _slower(self, source: str, tokens: int, estimate: Estimate) -> bool:
        if estimate.restore is None or estimate.recompute is None:
            return False
        if tokens > _FAR * self._rates.longest(source):
            return False
        return estimate.restore > max(_CLEARLY * estimate.recompute, estimate.recompute + _NOTICED)
