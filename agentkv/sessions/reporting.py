"""Counts and sizes put together for those who ask: a session's usage, a runtime's statistics."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from agentkv.sessions.core import SessionCore
from agentkv.sessions.stats import RuntimeStats, SessionUsage, TierStats

if TYPE_CHECKING:
    from agentkv.sessions.manager import Sessions

__all__ = ["look", "runtime_stats", "session_usage"]


_MOST_SHOWN = 200


def session_usage(core: SessionCore) -> SessionUsage:
    """One conversation's, since the runtime opened."""
    counts = core.counts
    return SessionUsage(
        session_id=core.id,
        agent_id=core.record.agent_id,
        turns=counts.turns,
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        completion_tokens=counts.completion_tokens,
        restores=dict(counts.restores),
        fallbacks=dict(counts.fallbacks),
        seconds_saved=counts.seconds_saved,
        device_byte_seconds=core.memory.now(),
        device_bytes=core.reserved,
        host_bytes=sum(core.held.values()),
    )


def runtime_stats(sessions: Sessions, opened: float) -> RuntimeStats:
    """All sessions', since ``opened`` (monotonic seconds). Quick: nothing is read from disk."""
    tiers, engine = sessions.tiers, sessions.engine
    cores, total = sessions.cores(), tiers.observer.total
    by_agent = Counter(tiers.observer.byte_seconds)
    for core in cores:
        by_agent[core.record.agent_id or ""] += core.memory.now()  # type: ignore[assignment]
    return RuntimeStats(
        uptime=time.monotonic() - opened,
        sessions=dict(Counter(str(core.state) for core in cores)),
        tiers={
            "device": TierStats(tiers.device_bytes, tiers.device_budget),
            "host": TierStats(tiers.host.used_bytes, tiers.host.budget_bytes),
            "disk": TierStats(tiers.blobs.used_bytes(), tiers.blobs.budget_bytes),
        },
        turns=total.turns,
        prompt_tokens=total.prompt_tokens,
        cached_tokens=total.cached_tokens,
        completion_tokens=total.completion_tokens,
        known_tokens=total.known_tokens,
        hit_rate=total.cached_tokens / total.known_tokens if total.known_tokens else None,
        restores=dict(total.restores),
        fallbacks=dict(total.fallbacks),
        seconds_saved=total.seconds_saved,
        waiting=tiers.residency.admission.waiting,
        running=sum(core.turns for core in cores),
        steps=engine.steps,
        computed_tokens=engine.computed_tokens,
        storage_error=tiers.behind.storage_error,
        byte_seconds=dict(by_agent),
        rates=tiers.residency.rates.told(1000),
    )


def look(sessions: Sessions, opened: float, model: str) -> dict[str, Any]:
    """``runtime_stats`` and a line for each session that holds memory or was used lately, as plain values."""
    now = time.monotonic()
    cores = sorted(sessions.cores(), key=lambda core: (core.idle, -core.last_used))
    return {
        "pid": os.getpid(),
        "model": model,
        "layout": sessions.tiers.layout.name,
        "stats": asdict(runtime_stats(sessions, opened)),
        "sessions": [
            {
                "id": core.id,
                "agent": core.record.agent_id,
                "state": str(core.state),
                "busy": not core.idle,
                "tokens": core.record.ledger_length,
                "turns": core.record.turns,
                "device_bytes": core.reserved,
                "host_bytes": sum(core.held.values()),
                "idle": now - core.last_used,
            }
            for core in cores[:_MOST_SHOWN]
        ],
    }
