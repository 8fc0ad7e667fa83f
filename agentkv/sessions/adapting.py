"""An adaptive session is under what its turn needs, from the turn's start on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from agentkv.engine.loading import LoadedModel
from agentkv.policies.retention import Adaptive, Ahead, ItemView, policy_text, suited
from agentkv.sessions.core import SessionCore
from agentkv.sessions.tiers import Tiers
from agentkv.types import Span, Tier

__all__ = ["adapting", "what_would_help"]


@asynccontextmanager
async def adapting(core: SessionCore, tiers: Tiers, items: Sequence[ItemView], more: int) -> AsyncIterator[None]:
    """Inside, an adaptive session is under what the turn that begins needs. Call with the gate held.

    The turn's commit makes it last; where the turn fails, the session is under what it was under before. ``items``: the
    turn's input included. ``more``: tokens that it adds at most.
    """
    before, policy = core.record, core.policy
    after = policy
    if isinstance(policy, Adaptive) and tiers.layout.geometry.fixed is None:
        after = policy.at_turn(_ahead(core, tiers, items, more))
    if after == policy:
        yield
        return
    limit = core.limit(tiers.residency.context)
    core.record = replace(before, policy=policy_text(after), policy_since=before.kv_length)
    try:
        if core.kv is not None and tiers.layout.reserves and core.limit(tiers.residency.context) != limit:
            # Reserved for the old window: the turn restores it into one of the right size.
            await tiers.demote(core, Tier.HOST)
        yield
    finally:
        if core.record.turns == before.turns:
            core.record = replace(core.record, policy=before.policy, policy_since=before.policy_since)
        else:
            tiers.observer.adapted(core, before.policy, core.record.policy)


def _ahead(core: SessionCore, tiers: Tiers, items: Sequence[ItemView], more: int) -> Ahead:
    record, context = core.record, tiers.residency.context
    tokens = core.held_tokens + more
    return Ahead(
        # A layout that reserves takes the memory for the whole context when a session without a window opens.
        tokens=max(tokens, context) if tiers.layout.reserves else tokens,
        pinned=Span(0, record.pinned),
        items=items,
        whole=record.held.tokens == record.kv_length,
        context=context,
        share=tiers.residency.share,
    )


def what_would_help(model: LoadedModel, pinned: Span) -> str:
    """What to do about a conversation that has become too long for the model."""
    if model.adapter.geometry.fixed is not None:
        return "the model holds no more; start a new session, or send less"
    policy = suited("sink", pinned, model.context_limit // 2, model.context_limit)
    if policy is None:
        return "system prompt and tools leave no room for more; start a new session with shorter ones, or send less"
    text = policy_text(policy)
    return (
        f"give the session a retention policy, which keeps the system prompt and what is recent: create it with "
        f"policy={text!r}, or from the next turn on session.set_policy({text!r}), over HTTP PATCH /v1/sessions/{{id}}; "
        f"all sessions: `--policy {text}` of chat and serve; or send less"
    )
