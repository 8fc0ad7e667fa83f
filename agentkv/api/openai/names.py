"""A conversation is a session: the same name under another prefix."""

from __future__ import annotations

from agentkv.api.errors import Refusal
from agentkv.errors import SessionNotFound

__all__ = ["ConversationUnknown", "conversation_of", "session_of"]

_SESSION, _CONVERSATION = "sess_", "conv_"


class ConversationUnknown(Refusal):
    """No such conversation for this key."""

    status, code, param = 404, "conversation_not_found", "conversation"


def conversation_of(session_id: str) -> str:
    """What a session is called as a conversation."""
    return _CONVERSATION + session_id.removeprefix(_SESSION)


def session_of(conversation_id: str) -> str:
    """The session that a conversation is. ``SessionNotFound`` for what is no conversation's name."""
    if not conversation_id.startswith(_CONVERSATION):
        raise SessionNotFound(conversation_id)
    return _SESSION + conversation_id.removeprefix(_CONVERSATION)
