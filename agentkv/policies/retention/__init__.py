"""Which tokens of a session stay in its KV state."""

from agentkv.policies.retention.adaptive import Adaptive, Ahead, suited, tool_share, window_kind
from agentkv.policies.retention.contract import (
    RETENTION,
    ItemView,
    RetentionPolicy,
    SessionView,
    check_fits,
    kept_by,
)
from agentkv.policies.retention.full import Full
from agentkv.policies.retention.parse import parse_policy, policy_text
from agentkv.policies.retention.sink import SinkWindow
from agentkv.policies.retention.sliding import SlidingWindow
from agentkv.policies.retention.turns import TurnWindow

__all__ = [
    "RETENTION",
    "Adaptive",
    "Ahead",
    "Full",
    "ItemView",
    "RetentionPolicy",
    "SessionView",
    "SinkWindow",
    "SlidingWindow",
    "TurnWindow",
    "check_fits",
    "kept_by",
    "parse_policy",
    "policy_text",
    "suited",
    "tool_share",
    "window_kind",
]
