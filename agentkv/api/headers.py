"""Headers of requests and answers: what they say, for the document, and what answers say of the KV that they used."""

from __future__ import annotations

from typing import Any, NamedTuple

from agentkv.schemas.replies import Begun

__all__ = ["ANSWER", "EXPOSED", "REQUEST", "Header", "cache_header"]


class Header(NamedTuple):
    """One header. ``always``: each answer that may have it does."""

    description: str
    schema: dict[str, Any]
    always: bool = True


REQUEST = {
    "X-Session-ID": Header(
        "The session that answers, as `session_id` in the body, which comes first. Empty says nothing.",
        {"type": "string", "maxLength": 200},
        always=False,
    ),
}
ANSWER = {
    "X-AgentKV-Session": Header("The session that answered.", {"type": "string", "pattern": "^sess_[0-9a-f]{32}$"}),
    "X-AgentKV-Cache": Header(
        "What was reused and what was computed, in tokens, and where it came from. A stream has it where that is known "
        "within the server's `grace_seconds`.",
        {
            "type": "string",
            "pattern": "^reused=[0-9]+;computed=[0-9]+;source=[a-z_]+;restore_ms=[0-9]+\\.[0-9]$",
        },
        always=False,
    ),
    "X-AgentKV-Diverged": Header(
        "Where the history that was sent leaves what was said: `system:120` (at that character), `tools`, "
        "`tools:order`, `template_args`, `policy`, `idle_codec`, `model`, or `messages:3`.",
        {"type": "string", "pattern": "^[a-z_]+(:[a-z0-9]+)?$"},
        always=False,
    ),
    "Content-Disposition": Header("The file's name.", {"type": "string"}),
    "Retry-After": Header("Seconds until it is worth trying again.", {"type": "integer", "minimum": 1}),
    "WWW-Authenticate": Header("How to authenticate.", {"const": "Bearer"}),
}
EXPOSED = ("X-AgentKV-Session", "X-AgentKV-Cache", "X-AgentKV-Diverged", "Retry-After")
"""Headers of answers that web pages may read."""


def cache_header(begun: Begun) -> str:
    """What a turn reuses and computes, for ``X-AgentKV-Cache``."""
    restore = begun.restore
    computed = begun.prompt_tokens - begun.cached_tokens
    return (
        f"reused={begun.cached_tokens};computed={computed};source={restore.source};"
        f"restore_ms={restore.seconds * 1000:.1f}"
    )
