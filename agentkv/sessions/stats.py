"""What a runtime and each of its sessions have done since it opened: counted where it happens, summed when asked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentkv.types import RestoreReport, Usage

__all__ = ["Counts", "Held", "RuntimeStats", "SessionUsage", "TierStats"]


@dataclass(slots=True)
class Held:
    """Byte-seconds of something whose size changes."""

    nbytes: int = 0
    since: float = field(default_factory=time.monotonic)
    total: float = 0.0

    def become(self, nbytes: int) -> None:
        """So many bytes from now on."""
        self.total, self.since, self.nbytes = self.now(), time.monotonic(), nbytes

    def now(self) -> float:
        """Up to this moment."""
        return self.total + self.nbytes * (time.monotonic() - self.since)


@dataclass(slots=True)
class Counts:
    """One session's, or all sessions' together. Tokens and seconds.

    ``restores``: by ``source:outcome``, where the outcome is ``whole``, ``partial`` or ``none``, or ``chosen`` where
    computing was expected to be faster. ``fallbacks``: faults, by reason. ``seconds_saved``: expected prefill of what
    was reused, less what restoring took.
    """

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    known_tokens: int = 0
    restores: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    seconds_saved: float = 0.0

    def turn(self, usage: Usage, known: int) -> None:
        """A turn was committed; ``known``: tokens whose KV the last one had left."""
        self.turns += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens
        self.known_tokens += known

    def restore(self, report: RestoreReport, recompute: float | None) -> None:
        """KV came back, or did not; ``recompute``: expected seconds of computing what was reused."""
        outcome = "whole" if report.reason is None else "partial" if report.tokens else "none"
        self.restores[f"{report.source}:{'chosen' if report.chosen else outcome}"] += 1
        if report.reason is not None and not report.chosen:
            self.fallbacks[report.reason.split(":")[0]] += 1
        if recompute is not None and report.tokens:
            self.seconds_saved += recompute - report.seconds


@dataclass(frozen=True, slots=True)
class SessionUsage:
    """What one conversation has used since the runtime opened. Byte-seconds: memory held, times how long."""

    session_id: str
    agent_id: str | None
    turns: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    restores: Mapping[str, int]
    fallbacks: Mapping[str, int]
    seconds_saved: float
    device_byte_seconds: float
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """Bytes in one tier, everything counted, and its budget."""

    used: int
    budget: int


@dataclass(frozen=True, slots=True)
class RuntimeStats:
    """A runtime now, and since it opened.

    ``sessions``: those touched since then, by state. ``known_tokens``: those whose KV the turn before had left;
    ``hit_rate``: the share of them that was not computed again, ``None`` before the first. ``waiting``: turns without
    memory yet. ``byte_seconds``: device memory by agent (``""``: without a name). ``rates``: what was measured, as
    seconds for 1,000 tokens: ``prefill``, and restores from ``host`` and ``disk``.
    """

    uptime: float
    sessions: Mapping[str, int]
    tiers: Mapping[str, TierStats]
    turns: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    known_tokens: int
    hit_rate: float | None
    restores: Mapping[str, int]
    fallbacks: Mapping[str, int]
    seconds_saved: float
    waiting: int
    running: int
    steps: int
    computed_tokens: int
    storage_error: str | None
    byte_seconds: Mapping[str, float]
    rates: Mapping[str, float]
