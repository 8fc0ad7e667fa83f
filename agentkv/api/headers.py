"""What answers say of the KV that they used, in a header."""

from __future__ import annotations

from agentkv.schemas.replies import Begun

__all__ = ["cache_header"]


def cache_header(begun: Begun) -> str:
    """What a turn reuses and computes, for ``X-AgentKV-Cache``."""
    restore = begun.restore
    computed = begun.prompt_tokens - begun.cached_tokens
    return (
        f"reused={begun.cached_tokens};computed={computed};source={restore.source};"
        f"restore_ms={restore.seconds * 1000:.1f}"
    )
