"""agentkv: durable KV state for LLM agent conversations.

``from agentkv import AgentKV`` imports no torch; opening a runtime does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentkv.errors import AgentKVError
from agentkv.policies.retention import Adaptive, Full, RetentionPolicy, SinkWindow, SlidingWindow, TurnWindow
from agentkv.types import ExportReport, ImportReport, RestoreReport, SuspendReport, Usage

if TYPE_CHECKING:
    from agentkv.schemas.constraints import Constraint
    from agentkv.schemas.messages import ToolCall
    from agentkv.schemas.replies import Done, Item, Reply, SessionInfo, TextDelta, ToolCallEvent
    from agentkv.sessions.events import LifecycleEvent
    from agentkv.sessions.hints import HintOutcome
    from agentkv.sessions.runtime import AgentKV
    from agentkv.sessions.session import Session
    from agentkv.sessions.stats import RuntimeStats, SessionUsage
    from agentkv.settings import Settings

__version__ = "0.1.0"

__all__ = [
    "Adaptive",
    "AgentKV",
    "AgentKVError",
    "Constraint",
    "Done",
    "ExportReport",
    "Full",
    "HintOutcome",
    "ImportReport",
    "Item",
    "LifecycleEvent",
    "Reply",
    "RestoreReport",
    "RetentionPolicy",
    "RuntimeStats",
    "Session",
    "SessionInfo",
    "SessionUsage",
    "Settings",
    "SinkWindow",
    "SlidingWindow",
    "SuspendReport",
    "TextDelta",
    "ToolCall",
    "ToolCallEvent",
    "TurnWindow",
    "Usage",
]

_LATE = {
    "AgentKV": "agentkv.sessions.runtime",
    "Constraint": "agentkv.schemas.constraints",
    "Done": "agentkv.schemas.replies",
    "HintOutcome": "agentkv.sessions.hints",
    "Item": "agentkv.schemas.replies",
    "LifecycleEvent": "agentkv.sessions.events",
    "Reply": "agentkv.schemas.replies",
    "RuntimeStats": "agentkv.sessions.stats",
    "Session": "agentkv.sessions.session",
    "SessionInfo": "agentkv.schemas.replies",
    "SessionUsage": "agentkv.sessions.stats",
    "Settings": "agentkv.settings",
    "TextDelta": "agentkv.schemas.replies",
    "ToolCall": "agentkv.schemas.messages",
    "ToolCallEvent": "agentkv.schemas.replies",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'agentkv' has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
