"""``lfu``: who is used least often."""

from __future__ import annotations

from agentkv.policies.residency.contract import RESIDENCY, ResidencyPolicy, SessionFacts

__all__ = ["Lfu"]


@RESIDENCY.register("lfu")
class Lfu(ResidencyPolicy):
    """The fewest turns first, old ones faded; among equals the longest idle."""

    name = "lfu"

    def worth(self, facts: SessionFacts) -> float:
        """Its turns, and less than one for how lately it was used."""
        return facts.uses + 1 / (2 + facts.idle)
