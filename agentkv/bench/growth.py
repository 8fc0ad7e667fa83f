"""What a conversation holds on the device as it grows, under one retention policy after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentkv.bench.setup import documentation_ids, machine, open_runtime
from agentkv.errors import ContextTooLong

__all__ = ["bench_growth"]

_SYSTEM = "You are a patient assistant who reads documentation."
_MESSAGE_TOKENS = 256


async def bench_growth(
    policies: Sequence[str],
    tokens: int,
    model: str,
    home: Path | None,
    dtype: str,
    threads: int | None,
) -> dict[str, Any]:
    """Messages of running text, one after the other, appended to a session a policy.

    ``policies``: of each, ``points``: tokens in the ledger and bytes reserved on the device after each message;
    ``ended``: why it went no further, ``None`` where it reached ``tokens``.
    """
    async with open_runtime(model, home, dtype=dtype, threads=threads, idle_seconds=3600) as (kv, _):
        tokenizer = kv.model.tokenizer
        ids = documentation_ids(kv, tokens)
        pieces = [ids[at : at + _MESSAGE_TOKENS] for at in range(0, len(ids), _MESSAGE_TOKENS)]
        messages = [{"role": "user", "content": str(tokenizer.decode(piece))} for piece in pieces]  # type: ignore[union-attr]
        found: dict[str, Any] = {}
        for policy in policies:
            session = await kv.sessions.create(_SYSTEM, policy=policy)
            points: list[tuple[int, int]] = []
            ended = None
            for message in messages:
                try:
                    await session.append([message])
                except ContextTooLong as error:
                    ended = str(error)
                    break
                state = await session.state()
                points.append((state.ledger_tokens, state.device_bytes))
                if points[-1][0] >= tokens:
                    break
            found[policy] = {"points": points, "ended": ended}
            await session.delete()
        return {
            "bench": "growth",
            "model": model,
            "tokens": tokens,
            "dtype": kv.model.adapter.geometry.dtype,
            "policies": found,
            **machine(kv),
        }
