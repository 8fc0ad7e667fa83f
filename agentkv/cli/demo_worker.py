"""The demo's other process: opens the home that the first one left, and goes on with its sessions.

``python -m agentkv.cli.demo_worker`` reads one JSON line from standard input (settings, sessions, next messages) and
answers with JSON lines. It is told nothing of what the continuations should be. For each session, in this order:

1. all resumed turns: KV read from disk, verified, decoded, the next message computed, the reply generated;
2. all cold turns: the very same prompt, as tokens, in a fresh session that has no KV.

A throw-away turn comes first, so that neither side pays for the first use of the model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentkv.sessions.runtime import AgentKV

__all__ = ["main"]


def _say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


async def _work(task: dict[str, Any]) -> None:
    from agentkv.logs import configure_logging
    from agentkv.sessions.runtime import AgentKV

    kv = AgentKV.open(**task["settings"])
    configure_logging(kv.settings.log_format)
    async with kv:
        warm = await kv.sessions.create(system="Warm up.")
        await warm.send("Count to ten, please, and then to twenty.", max_tokens=4, ignore_eos=True)
        await warm.delete()
        _say(event="open")
        prompts = {}
        for wanted in task["sessions"]:
            session = await kv.sessions.get(wanted["id"])
            reply = await session.send(wanted["message"], max_tokens=task["max_tokens"])
            ids = await session.token_ids()
            prompts[session.id] = ids[: reply.usage.prompt_tokens]
            _say(
                event="resumed",
                id=session.id,
                ids=list(reply.ids),
                text=reply.text,
                ttft_s=reply.ttft_seconds,
                cached_tokens=reply.usage.cached_tokens,
                prompt_tokens=reply.usage.prompt_tokens,
                source=reply.restore.source,
                restore_s=reply.restore.seconds,
                reason=reply.restore.reason,
            )
        for session_id, prompt in prompts.items():
            _say(event="cold", id=session_id, ttft_s=await _cold(kv, prompt))


async def _cold(kv: AgentKV, prompt: list[int]) -> float:
    """Seconds to the first token of ``prompt`` where nothing is cached."""
    fresh = await kv.sessions.create()
    head = len(await fresh.token_ids())  # a template's default system prompt stands in for as many tokens
    reply = await fresh.generate_tokens(prompt[head:], max_tokens=1)
    await fresh.delete()
    if reply.usage.cached_tokens:
        raise RuntimeError(f"a cold prefill reused {reply.usage.cached_tokens} tokens")
    return reply.ttft_seconds


def main() -> int:
    """Exit status 1, with an ``error`` line, where the work cannot be done."""
    from agentkv.errors import AgentKVError

    task = json.loads(sys.stdin.readline())
    try:
        asyncio.run(_work(task))
    except AgentKVError as error:
        _say(event="error", message=str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
