"""Can this runtime go on with it? Policies, ledgers and heads, held against the model that is loaded."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from agentkv.engine.loading import LoadedModel
from agentkv.engine.templates import ChatTemplate
from agentkv.errors import ContextTooLong, InvalidRequest, Unsupported
from agentkv.policies.retention import Adaptive, RetentionPolicy, check_fits, parse_policy
from agentkv.schemas.messages import Message
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.records import ItemRecord, SessionRecord, TurnRecord
from agentkv.types import Span

__all__ = [
    "check_core",
    "check_head",
    "check_ledger",
    "check_movable",
    "check_pinned",
    "chosen_policy",
    "head_of",
    "head_records",
]


def chosen_policy(policy: str | RetentionPolicy) -> RetentionPolicy:
    """A policy that somebody chooses: an adaptive one finds by itself what it is under."""
    chosen = parse_policy(policy)
    if isinstance(chosen, Adaptive) and chosen.window is not None:
        raise InvalidRequest(
            f"policy 'adaptive' begins as 'full' and moves by itself: give it without now={chosen.now!r}",
            param="policy",
        )
    return chosen


def check_movable(policy: RetentionPolicy, model: LoadedModel) -> None:
    """``Unsupported`` for a policy that evicts, where the model's KV cannot be moved."""
    fixed = model.adapter.geometry.fixed
    if policy.evicts and fixed is not None:
        raise Unsupported(
            f"policy {policy.name!r} with {model.name!r}",
            f"{fixed}, so that nothing can be evicted: use 'full'",
            param="policy",
        )


def check_head(policy: RetentionPolicy, head: Sequence[int], model: LoadedModel) -> None:
    """``ContextTooLong`` for a head that leaves no room to say anything, ``InvalidRequest`` where no window of the
    policy holds it."""
    limit = model.context_limit
    if len(head) >= limit:
        raise ContextTooLong(
            tokens=len(head) + 1, limit=limit, advice="system prompt and tools alone exceed it; shorten them"
        )
    check_fits(policy, Span(0, len(head)), limit)


def check_pinned(record: SessionRecord, policy: RetentionPolicy) -> None:
    """No policy promises what an earlier one has evicted."""
    wanted = min(policy.pinned_tokens(Span(0, record.pinned)), record.pinned, record.kv_length)
    held = sum(len(span.intersect(Span(0, wanted))) for span in record.held.kept)
    if policy.evicts and held < wanted:
        raise InvalidRequest(
            f"policy {policy.name!r} keeps the first {wanted:,} tokens (system prompt and tools), of which "
            f"{record.policy!r} has evicted {wanted - held:,}: go on under it or 'full', or begin a new session",
            param="policy",
        )


def check_ledger(record: SessionRecord, model: LoadedModel) -> None:
    """``InvalidRequest`` where the model would misread the session's token ids."""
    if record.session_fingerprint.split(".")[0] != model.fingerprints.session.split(".")[0]:
        raise InvalidRequest(
            f"session {record.id} was written with the tokenizer of {record.model!r}; {model.name!r} has "
            f"another one and would misread it. Open the runtime with model={record.model!r}",
            param="model",
        )


def check_core(core: SessionCore, model: LoadedModel, tool_format: str) -> None:
    """Raise ``InvalidRequest`` where the model cannot go on with a session that was made elsewhere. Blocking."""
    record = core.record
    check_ledger(record, model)
    policy = parse_policy(record.policy)
    check_movable(policy, model)
    check_fits(policy, Span(0, record.pinned), model.context_limit)
    head_of(core, model, tool_format)


def head_of(core: SessionCore, model: LoadedModel, tool_format: str) -> tuple[ChatTemplate | None, list[int]]:
    """The session's template, and the token ids of its system prompt and tools. Blocking."""
    if model.tokenizer is None:
        if core.record.system is not None or core.record.tools or core.record.template_args:
            raise InvalidRequest(
                "this model has no tokenizer: create the session without system, tools and template_args, "
                "then use append_tokens and generate_tokens",
                param="system",
            )
        return None, []
    template = core.chat(model.tokenizer)
    core.tool_use(model.tokenizer, tool_format)
    return template, template.head().ids


def head_records(system: str | None, head: Sequence[int], now: float) -> tuple[list[ItemRecord], TurnRecord | None]:
    """The system span as an item, and the turn that put it into the ledger."""
    if not head:
        return [], None
    span = Span(0, len(head))
    content = Message(role="system", content=system or "").canonical()
    item = ItemRecord(f"item_{secrets.token_hex(12)}", 0, 0, "system", "message", content, span, False)
    return [item], TurnRecord(0, span, "head", None, len(head), 0, 0, None, None, now)
