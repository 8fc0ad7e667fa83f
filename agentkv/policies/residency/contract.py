"""What a residency policy is: facts about idle sessions to the order in which they leave a tier. It moves nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from agentkv.errors import InvalidRequest
from agentkv.registry import Registry

__all__ = ["RESIDENCY", "Plan", "ResidencyPolicy", "SessionFacts", "parse_residency", "plan"]


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """One idle session, as a policy sees it. Seconds and bytes.

    ``nbytes``: what its demotion frees in the tier it leaves. ``idle``: time since its last turn; ``gap``: how long
    its earlier pauses were (exponential mean), ``None`` before the first. ``uses``: its turns so far, old ones fading.
    ``expected``: until it is wanted again, by its user's hint (negative once that is past); ``None`` without one.
    ``restore``: what bringing it back is expected to take.
    """

    id: str
    nbytes: int
    idle: float
    gap: float | None
    uses: float
    expected: float | None
    restore: float


class ResidencyPolicy(ABC):
    """Pure: the same facts always give the same worth."""

    name: str

    @abstractmethod
    def worth(self, facts: SessionFacts) -> float:
        """How much it is worth to keep the session where it is: the least worthy leaves first."""


RESIDENCY: Registry[type[ResidencyPolicy]] = Registry("residency", "residency policy")


@dataclass(frozen=True, slots=True)
class Plan:
    """Sessions to demote, in this order, and the bytes that frees."""

    sessions: tuple[str, ...]
    nbytes: int


def plan(policy: ResidencyPolicy, candidates: Sequence[SessionFacts], needed: int) -> Plan | None:
    """Which of ``candidates`` to demote so that ``needed`` bytes are free; ``None`` where all of them are not enough.

    The least worthy first. One that turns out not to be needed, because a later one frees enough alone, stays.
    """
    chosen: list[SessionFacts] = []
    freed = 0
    for facts in sorted(candidates, key=lambda facts: (policy.worth(facts), facts.id)):
        if freed >= needed:
            break
        chosen.append(facts)
        freed += facts.nbytes
    if freed < needed:
        return None
    for facts in reversed(chosen[:-1]):
        if freed - facts.nbytes >= needed:
            chosen.remove(facts)
            freed -= facts.nbytes
    return Plan(tuple(facts.id for facts in chosen), freed)


def parse_residency(text: str) -> ResidencyPolicy:
    """``lru``, ``lfu``, ``cost``, ``ttl:600``, or one by entry point. ``InvalidRequest`` says what is wrong with it."""
    name, _, argument = text.partition(":")
    made = RESIDENCY.get(name)
    try:
        return made(float(argument)) if argument else made()  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"residency policy {text!r} was refused: {error}; e.g. ttl:600", param="residency"
        ) from None
