"""Generated tokens a second."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median
from typing import Any

from agentkv.bench.setup import machine, open_runtime, reference_of, text_ids, timed

__all__ = ["bench_decode"]


async def bench_decode(
    sessions: int, context: int, model: str, home: Path | None, dtype: str, threads: int | None, quick: bool
) -> dict[str, Any]:
    """Rounds of both in turn, each side continuing where its last round ended; the ratio is the median over rounds.

    agentkv: whole turns through the public API, from the first generated token on. transformers: a batched forward a
    token, DynamicCache, greedy.
    """
    rounds, steps = (2, 8) if quick else (7, 24)
    if quick:
        context = min(context, 256)
    async with open_runtime(model, home, dtype=dtype, threads=threads, idle_seconds=3600) as (kv, local):
        reference = await kv.model.engine.call(lambda: reference_of(kv, local))
        rows = [text_ids(kv, context, seed=i) for i in range(sessions)]
        held = [await kv.sessions.create() for _ in rows]
        for session, row in zip(held, rows, strict=True):
            await session.append_tokens(row)
        await kv.model.engine.call(lambda: reference.prefill(rows))
        await kv.flush()

        async def ours() -> float:
            turns = [s.generate_tokens((), max_tokens=steps + 1, ignore_eos=True) for s in held]
            replies = await asyncio.gather(*turns)
            rate = sum(steps / (r.seconds - r.ttft_seconds) for r in replies)
            await kv.flush()
            return rate

        async def theirs() -> float:
            def run() -> None:
                for _ in range(steps):
                    reference.decode()

            return sessions * steps / await kv.model.engine.call(lambda: timed(run))

        await ours()
        await theirs()
        pairs = [(await ours(), await theirs()) for _ in range(rounds)]
        return {
            "bench": "decode",
            "model": model,
            "sessions": sessions,
            "context": context,
            "dtype": kv.model.adapter.geometry.dtype,
            "agentkv_tok_s": median(a for a, _ in pairs),
            "transformers_tok_s": median(b for _, b in pairs),
            "ratio": median(a / b for a, b in pairs),
            "ratio_min": min(a / b for a, b in pairs),
            "ratio_max": max(a / b for a, b in pairs),
            "rounds": rounds,
            "steps": steps,
            **machine(kv),
        }
