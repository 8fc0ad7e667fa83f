"""``lru`` and ``ttl``: who was used last."""

from __future__ import annotations

import math

from agentkv.policies.residency.contract import RESIDENCY, ResidencyPolicy, SessionFacts

__all__ = ["Lru", "Ttl"]


@RESIDENCY.register("lru")
class Lru(ResidencyPolicy):
    """The longest idle first."""

    name = "lru"

    def worth(self, facts: SessionFacts) -> float:
        """Minus its idle seconds."""
        return -facts.idle


@RESIDENCY.register("ttl")
class Ttl(ResidencyPolicy):
    """Those idle longer than ``seconds`` first, the largest of them before others; then the longest idle."""

    name = "ttl"

    def __init__(self, seconds: float = 300.0) -> None:
        if not seconds > 0 or math.isinf(seconds):
            raise ValueError(f"a time to live is a positive number of seconds, not {seconds}")
        self.seconds = seconds

    def worth(self, facts: SessionFacts) -> float:
        """Below every other's once its time is over."""
        return -1e15 - facts.nbytes if facts.idle > self.seconds else -facts.idle
