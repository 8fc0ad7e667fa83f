"""Why a conversation that goes on was not found: what of it differs from the one it most likely was."""

from __future__ import annotations

from os.path import commonprefix
from typing import TYPE_CHECKING

from agentkv.schemas.messages import identities
from agentkv.sessions.db.records import SessionRecord
from agentkv.sessions.heads import behind_head
from agentkv.sessions.histories import History, messages_in

if TYPE_CHECKING:
    from agentkv.sessions.manager import Sessions

__all__ = ["diverged"]

_LATEST = 8
"""So many of the tenant's sessions are looked at, the latest first."""


async def diverged(sessions: Sessions, history: History, matched: int) -> str | None:
    """Where a history whose first ``matched`` messages are known leaves what was said; ``None`` where it does not, or
    nothing of the kind was said lately.

    ``"system:120"``: at that character of the system prompt; ``"tools"``, or ``"tools:order"`` where they are the same
    in another order; ``"template_args"``, ``"policy"``, ``"idle_codec"``, ``"model"``; else ``"messages:3"``, the index
    in the list as it was sent. Only a history with an answer among what is not known is one that goes on: others begin.
    """
    answers = [index for index, message in enumerate(history.messages) if message.role == "assistant"]
    if not answers or answers[-1] < matched:
        return None
    theirs = identities(history.messages[: answers[-1] + 1])  # what is new may have been said elsewhere, too
    first = history.system is not None  # of its messages in the list as it was sent
    found: list[tuple[int, int, str]] = []
    for record in await sessions.repository.latest_sessions(sessions.tenant, _LATEST):
        items = behind_head(record, await sessions.repository.items(record.id))
        ours = identities(messages_in(items))
        same = [one == other for one, other in zip(theirs, ours, strict=False)]
        # A question in common is no conversation in common: an answer is.
        if sum(same) > matched and any(same[index] for index in answers if index < len(same)):
            parts = _parts(sessions, history, record) or [f"messages:{[*same, False].index(False) + first}"]
            found.append((-sum(same), len(parts), parts[0]))
    if found:
        return min(found)[2]
    return f"messages:{matched + first}" if matched else None


def _parts(sessions: Sessions, history: History, record: SessionRecord) -> list[str]:
    """What of the head is not as it is in a session, the first of it first."""
    mine, parts = sessions.beginning(history), []
    if any(getattr(record, name) != mine[name] for name in ("kv_fingerprint", "session_fingerprint")):
        parts.append("model")
    system, before = (history.system or "").strip(), (record.system or "").strip()
    if system != before:
        parts.append(f"system:{len(commonprefix((system, before)))}")  # noqa: RUF071  characters are meant
    tools, known = list(history.tools or ()), list(record.tools or ())
    if tools != known:
        same = len(tools) == len(known) and all(tool in known for tool in tools)
        parts.append("tools:order" if same else "tools")
    if dict(history.template_args) != record.template_args:
        parts.append("template_args")
    if record.policy.partition(":now=")[0] != mine["policy"]:
        parts.append("policy")
    if record.idle_codec != mine["idle_codec"]:
        parts.append("idle_codec")
    return parts
