"""Which sessions stay on the device."""

from agentkv.policies.residency.contract import (
    RESIDENCY,
    Plan,
    ResidencyPolicy,
    SessionFacts,
    parse_residency,
    plan,
)
from agentkv.policies.residency.cost import Cost
from agentkv.policies.residency.lfu import Lfu
from agentkv.policies.residency.recency import Lru, Ttl

__all__ = [
    "RESIDENCY",
    "Cost",
    "Lfu",
    "Lru",
    "Plan",
    "ResidencyPolicy",
    "SessionFacts",
    "Ttl",
    "parse_residency",
    "plan",
]
